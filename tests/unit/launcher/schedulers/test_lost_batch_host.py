"""A launcher does what is left to do with a job of Slurm's whose batch script is gone with its host."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

import pytest

from megatron_ft.job.rules.lives import Ending
from megatron_ft.launcher.schedulers import slurm as slurms

ALLOCATED = {"FT_SLURM_REQUEUES": "7", "SLURM_JOB_NODELIST": "node[1-3]"}
SHOWN = "JobId=7 JobState={} NodeList={} BatchHost=node1"


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
    monkeypatch.setattr(slurms, "run_command", slurm.run)
    monkeypatch.setattr(slurms, "host_answers", lambda _host, _port: slurm.host_answers)
    monkeypatch.setattr(slurms.time, "sleep", slurm.sleep)
    return slurm


def test_launcher_requeues_the_job_once_slurm_knows_of_the_lost_host(slurm: Slurm) -> None:
    told: list[str] = []
    slurm.told = iter([SHOWN.format("RUNNING", "node[1-3]")] * 2 + [SHOWN.format("RUNNING", "node[2-3]")])
    slurms.requeue(ALLOCATED, 0, Ending.LOST, 1, told.append, lambda: told.append("flushed"))
    assert (slurm.ran, slurm.slept) == (["scontrol requeue 7"], 20.0)
    says = "the batch script's host is lost; this launcher runs what the script would have run: "
    assert told == ["flushed", f"{says}scontrol requeue 7"]
    slurm.forbids = True  # then it is cancelled
    slurm.told = iter([SHOWN.format("RUNNING", "node[2-3]")] * 2)
    slurms.requeue(ALLOCATED, 0, Ending.STOPPED, 1, lambda _text: None, lambda: None)
    assert slurm.ran == ["scontrol requeue 7"] * 2 + ["scancel 7"]


def test_a_host_answers_also_by_a_refusal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert slurms.host_answers("127.0.0.1", port)
    assert slurms.host_answers("127.0.0.1", port)
    assert slurms.host_answers("no-such-host.invalid", 1)
