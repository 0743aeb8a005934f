"""What launchers tell each other through a real store, and how soon they hear of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from megatron_ft.core.job_view import gone, node_changed
from megatron_ft.core.restart_policy import AnyFailed, NodeState, Outcome
from megatron_ft.launcher import job_log
from megatron_ft.launcher.doorbell import Doorbell
from megatron_ft.launcher.job_log import JobLog
from megatron_ft.launcher.reactor import THREAD_PREFIX

BOUND_S = 40.0
NEVER_S = 1000.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Job:
    """Launchers of one job, without anything but their logs."""

    def __init__(self) -> None:
        self.host: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.logs: list[JobLog] = []
        self.decided: list[Outcome | None] = []

    def node(self, number: int, nodes: int, *, bell: Doorbell | None = None) -> JobLog:
        store = self.connection()
        log = JobLog(
            PrefixStore("round/0", store),
            prefix="job",
            node=number,
            nodes=nodes,
            name=f"host{number}",
            interval_s=NEVER_S,
            judge=AnyFailed(3).judge_nodes,
            on_decided=lambda view: self.decided.append(view.outcome),
            bell=bell or Doorbell(store, run_id="job"),
        )
        self.logs.append(log)
        return log

    def connection(self) -> Any:
        return TCPStore("127.0.0.1", self.host.port, is_master=False, wait_for_workers=False)

    def close(self) -> None:
        for log in self.logs:
            log.stop()
        del self.host
        wait_until(lambda: not any(thread.name.startswith(THREAD_PREFIX) for thread in threading.enumerate()))


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.close()


def failed(number: int) -> Any:
    return node_changed(number, NodeState.UNHEALTHY, name=f"host{number}", text="died")


def test_all_hear_at_once_and_agree_who_was_first(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_log, "KEEP_ALIVE_INTERVAL_S", NEVER_S)  # nobody looks by itself
    monkeypatch.setattr(job_log, "_INTERVAL_WHEN_OVER_S", NEVER_S)
    logs = [job.node(number, 3) for number in range(3)]
    time.sleep(0.2)  # all have looked once, and sleep
    logs[1].append(failed(1))
    logs[2].append(failed(2))
    wait_until(lambda: all(log.view.outcome is Outcome.FAILED for log in logs))
    assert len({log.view.decided_by for log in logs}) == 1
    wait_until(lambda: all(log.is_written() for log in logs))
    # the second one's failure follows from the first, and nobody needs to read of it
    assert all(log.view.count(NodeState.UNHEALTHY) == 1 for log in logs)
    assert job.decided == [Outcome.FAILED] * 3


def test_who_comes_late_hears_what_comes_then(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_log, "KEEP_ALIVE_INTERVAL_S", NEVER_S)
    store = job.connection()
    early = Doorbell(store, run_id="job")
    for _ in range(5):
        early.ring(store)
    rings: list[int] = []
    late = Doorbell(job.connection(), run_id="job")
    late.on_ring = lambda: rings.append(1)
    time.sleep(0.1)
    assert rings == []
    early.ring(store)
    wait_until(lambda: rings == [1])


def test_silent_node_is_found_lost_sooner_once_the_cycle_is_over(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_log, "KEEP_ALIVE_INTERVAL_S", 0.05)
    monkeypatch.setattr(job_log, "_INTERVAL_WHEN_OVER_S", 0.05)
    monkeypatch.setattr(job_log, "LOST_AFTER_S", NEVER_S)
    monkeypatch.setattr(job_log, "LOST_AFTER_WHEN_OVER_S", 0.5)
    logs = [job.node(number, 4) for number in range(4)]
    for log in logs[2:]:  # two at once
        log.stop()
    time.sleep(1.0)
    assert logs[0].view.count(NodeState.LOST) == 0
    logs[0].cycle_is_over()
    wait_until(lambda: all(log.view.count(NodeState.LOST) == 2 for log in logs[:2]))
    assert logs[1].view.nodes[2].state is logs[1].view.nodes[3].state is NodeState.LOST
    assert logs[1].view.nodes[3].name == "host3"


def test_store_that_cannot_be_waited_for_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_log, "KEEP_ALIVE_INTERVAL_S", NEVER_S)
    store = HashStore()
    bell = Doorbell(store, run_id="job")
    assert not bell.is_heard
    log = JobLog(
        PrefixStore("round/0", store),
        prefix="job",
        node=0,
        nodes=2,
        name="host0",
        interval_s=0.02,
        judge=AnyFailed(3).judge_nodes,
        on_decided=lambda _: None,
        bell=bell,
    )
    time.sleep(0.1)
    store.set("round/0/job/log/0", '{"ev": "state", "node": 1, "state": "unhealthy"}')
    wait_until(lambda: log.view.decided_by == 1)
    log.stop()


def test_host_of_the_store_is_gone(job: Job) -> None:
    log = job.node(0, 2)
    # torch tries for long to reach a host that was never there
    log.append(gone(0))
    wait_until(lambda: log.is_written() and bool(log.view.gone))
    host, job.host = job.host, None
    del host
    wait_until(lambda: log.error is not None)
