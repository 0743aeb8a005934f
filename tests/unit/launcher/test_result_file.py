"""What a launcher writes of its life into ``result.json``."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from megatron_ft.job.rules.decisions import Assignment, Decision, DecisionKind
from megatron_ft.job.rules.lives import Ending, Lives
from megatron_ft.job.rules.restart_policy import JobProgress
from megatron_ft.launcher.outcome import LauncherEnd, ResultFile
from megatron_ft.records.rules.accounting import Accounting, CycleSummary
from tests.support.agents import verdict


@pytest.mark.parametrize(
    ("end", "before", "iteration", "trained"),
    [
        (LauncherEnd(0, Ending.FINISHED, ranks_exited_with_0=True), JobProgress(), None, True),
        (LauncherEnd(1, Ending.STOPPED), JobProgress(), 0, True),
        (LauncherEnd(1, Ending.FAILED), JobProgress(), None, False),
        (LauncherEnd(1, Ending.FAILED), JobProgress(trained=True), None, True),
    ],
)
def test_life_has_trained_if_a_cycle_of_the_job_was_through_its_start(
    end: LauncherEnd, before: JobProgress, iteration: int | None, trained: bool, tmp_path: Path
) -> None:
    a_result(tmp_path, place=None, before=before).ended(end, decided=None, accounting=reached(iteration))
    (life,) = Lives.parse((tmp_path / "result.json").read_text()).lives
    assert life.trained is trained


VERDICT = verdict(text="its launcher exited", restarts_left=1, node=1, name="node1", nodes=2)


def reached(iteration: int | None) -> Accounting:
    return Accounting(cycles=(CycleSummary(cycle=0, begin_ns=0, end_ns=None, outcome="", last_iteration=iteration),))


def a_result(directory: Path, *, place: int | None = 0, before: JobProgress = JobProgress()) -> ResultFile:  # noqa: B008
    """One that is in a cycle, if it has a ``place``."""
    log = mock.Mock()
    log.do.side_effect = lambda write: write()
    result = ResultFile(log, str(directory), job="j", command=["t.py"], is_first=True, before=before)
    if place is not None:
        result.begun(Assignment(Decision(0, "c.1", DecisionKind.START, 0, 2), place))
    return result


def test_a_loss_that_a_successor_tells_again_counts_once(tmp_path: Path) -> None:
    result = a_result(tmp_path)
    result.concluded(VERDICT)
    result.concluded(VERDICT)
    assert result.bad_nodes() == {"node1": "its launcher exited"}
    result.begun(Assignment(Decision(1, "d.1", DecisionKind.START, 1, 2, back=("node1",)), 0))
    assert result.bad_nodes() == {}
