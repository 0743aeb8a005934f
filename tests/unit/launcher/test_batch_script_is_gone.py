"""A launcher does what is left to do with a job of Slurm's whose batch script is gone with its host."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

import pytest

from megatron_ft.job.rules.decisions import Assignment, Decision, DecisionKind
from megatron_ft.job.rules.lives import Ending
from megatron_ft.job.rules.restart_policy import JobProgress
from megatron_ft.launcher import lost_batch_host
from megatron_ft.launcher.outcome import LauncherEnd, ResultFile
from megatron_ft.records.event_log import NullEventLog
from megatron_ft.records.rules.accounting import Accounting

ALLOCATED = {"FT_SLURM_REQUEUES": "7", "SLURM_JOB_NODELIST": "node[1-3]"}
SHOWN = "JobId=7 JobState={} NodeList={} BatchHost=node1"


def ended(ending: Ending = Ending.STOPPED, *, place: int = 0, kind: DecisionKind = DecisionKind.END) -> ResultFile:
    result = ResultFile(NullEventLog(), None, job="j", command=["t.py"], is_first=False, before=JobProgress())
    result.begun(Assignment(Decision(0, "c.0", DecisionKind.START, 0, 2), place))
    result.ended(LauncherEnd(0, ending), decided=Decision(1, "c.1", kind, 0, 2), accounting=Accounting())
    return result


class Slurm:
    """Answers ``told`` in turn; a requeue fails if it is forbidden."""

    def __init__(self) -> None:
        self.told: Iterator[str] = iter(())
        self.ran: list[str] = []
        self.forbids = self.host_answers = False
        self.slept = 0.0

    def run(self, words: Sequence[str]) -> str | None:
        if "show" in words:
            return next(self.told)
        self.ran.append(" ".join(words))
        return None if self.forbids and "requeue" in words else ""

    def sleep(self, seconds: float) -> None:
        self.slept += seconds


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    slurm = Slurm()
    monkeypatch.setattr(lost_batch_host, "run_command", slurm.run)
    monkeypatch.setattr(lost_batch_host, "host_answers", lambda _host, _port: slurm.host_answers)
    monkeypatch.setattr(lost_batch_host.time, "sleep", slurm.sleep)
    return slurm


def test_launcher_requeues_the_job_once_slurm_knows_of_the_lost_host(slurm: Slurm) -> None:
    told: list[str] = []
    slurm.told = iter([SHOWN.format("RUNNING", "node[1-3]")] * 2 + [SHOWN.format("RUNNING", "node[2-3]")])
    lost_batch_host.requeue_if_batch_host_lost(ended(Ending.LOST), ALLOCATED, told.append, port=1)
    assert (slurm.ran, slurm.slept) == (["scontrol requeue 7"], 20.0)
    says = "the batch script's host is lost; this launcher runs what the script would have run: "
    assert told == [f"{says}scontrol requeue 7"]


def test_launcher_cancels_the_job_where_a_requeue_is_forbidden(slurm: Slurm) -> None:
    slurm.forbids = True
    slurm.told = iter([SHOWN.format("RUNNING", "node[2-3]")] * 2)
    lost_batch_host.requeue_if_batch_host_lost(ended(), ALLOCATED, lambda _text: None, port=1)
    assert slurm.ran == ["scontrol requeue 7", "scancel 7"]


def test_a_host_answers_also_by_a_refusal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert lost_batch_host.host_answers("127.0.0.1", port)
    assert lost_batch_host.host_answers("127.0.0.1", port)
    assert lost_batch_host.host_answers("no-such-host.invalid", 1)
