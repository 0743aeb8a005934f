"""Asking a launcher for its status: the answer, and launchers that don't answer."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from megatron_ft.cli.status import jobs
from megatron_ft.cli.status.jobs import RunningJob, SilentError, facts_of, running_ranks
from megatron_ft.errors import FaultToleranceError
from megatron_ft.link.wire import accept_peer, listen
from tests.support.status_facts import job_facts, rank_facts


@pytest.fixture
def job(tmp_path: Path) -> RunningJob:
    return RunningJob(launcher_pid=os.getpid(), run_id="demo", socket=str(tmp_path / "launcher.sock"))


def test_facts_are_what_the_launcher_answers(job: RunningJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "ANSWER_S", 60.0)  # a loaded machine may need longer than a person would wait
    facts = job_facts(rank_facts(), rank_facts(rank=6, exit_code=1))
    asked = []
    with listen(job.socket) as listener:
        listener.setblocking(True)

        def answer() -> None:
            for _ in range(2):
                peer = accept_peer(listener)
                assert peer is not None
                asked.append(peer[0].wait_message(60.0).message.name)
                peer[0].send(facts)
                os.close(peer[2])

        launcher = threading.Thread(target=answer)
        launcher.start()
        assert facts_of(job) == facts
        assert [row.rank for row in running_ranks(job)] == [5]
        launcher.join()
    assert asked == ["status"] * 2


def test_launcher_that_does_not_answer_is_given_up_in_bounded_time(
    job: RunningJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "ANSWER_S", 0.2)
    with pytest.raises(FaultToleranceError, match=f"ft_launcher {os.getpid()} can't be reached"):
        facts_of(job)
    with listen(job.socket):
        began = time.monotonic()
        with pytest.raises(SilentError, match=f"^ft_launcher {os.getpid()}, job demo, doesn't answer$"):
            facts_of(job)
        assert 0.2 <= time.monotonic() - began < 5.0
