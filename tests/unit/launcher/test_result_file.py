"""What a launcher writes of its life into ``result.json``."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from megatron_ft.core.job.lives import Ending, Lives
from megatron_ft.core.job.restart_policy import Advance
from megatron_ft.launcher.outcome import End, ResultFile


@pytest.mark.parametrize(
    ("end", "before", "iteration", "trained"),
    [
        (End(0, Ending.FINISHED, ranks_exited_with_0=True), Advance(), None, True),
        (End(0, Ending.STOPPED, ranks_exited_with_0=True), Advance(), None, True),
        (End(1, Ending.STOPPED), Advance(), 0, True),
        (End(1, Ending.STOPPED), Advance(), None, False),
        (End(1, Ending.FAILED), Advance(), None, False),
        (End(1, Ending.FAILED), Advance(trained=True), None, True),
    ],
)
def test_life_has_trained_if_a_cycle_of_the_job_was_through_its_start(
    end: End, before: Advance, iteration: int | None, trained: bool, tmp_path: Path
) -> None:
    log = mock.Mock()
    log.do.side_effect = lambda write: write()
    result = ResultFile(log, str(tmp_path), job="j", command=["t.py"], is_first=True, before=before)
    result.ended(end, decided=None, iteration=iteration)
    (life,) = Lives.parse((tmp_path / "result.json").read_text()).lives
    assert life.trained is trained
