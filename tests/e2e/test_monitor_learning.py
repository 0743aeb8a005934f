"""A monitor with learned timeouts: its launcher's slot, its process and its rank, without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from megatron_ft import FaultToleranceConfig
from megatron_ft.launcher.processes.monitors import MonitorSlot
from megatron_ft.learning.messages import Arm, Intervals
from megatron_ft.link.base import layout
from megatron_ft.link.base.layout import ArmedTimeout
from megatron_ft.link.facts.monitor import Attached
from megatron_ft.link.facts.shared import RankHung
from megatron_ft.link.messages.monitor_messages import ExtendTimeout, Release, Report, Suspect
from megatron_ft.link.reactor import Reactor
from megatron_ft.monitor.process import MonitorOptions
from megatron_ft.records.event_log import NullEventLog
from tests.support.monitored import expect, rank

T = TypeVar("T")
FOREVER = "while True: signal.pause()"
BEGIN = "client.init_workload_monitoring()\n"
BOUND_S = 20.0


class Launcher:
    """What a launcher does with one monitor, step by step."""

    def __init__(self, path: Path, reactor: Reactor) -> None:
        self.path = path
        self.reports: list[Report] = []
        self.lines: list[str] = []
        self._reactor = reactor
        # a section without a timeout of its own
        config = FaultToleranceConfig(rank_section_timeouts={"step": None, "save": None})
        self.slot = MonitorSlot(
            0,
            path=str(path),
            options=MonitorOptions(config=config),
            reactor=reactor,
            log=NullEventLog(),
            say=self.lines.append,
            on_event=lambda event: self.reports.append(event.report),
        )
        self.slot.start()

    def next(self, kind: type[T]) -> T:
        """The first report of this kind, which it forgets."""
        found: list[T] = []

        def has_come() -> bool:
            found.extend(each for each in self.reports if isinstance(each, kind))
            return bool(found)

        assert self._reactor.run_until(has_come, time.monotonic() + BOUND_S), (kind, self.reports)
        self.reports.remove(found[0])  # type: ignore[arg-type]
        return found[0]

    def serve(self, seconds: float) -> None:
        """Take what comes in this time."""
        self._reactor.run_until(lambda: False, time.monotonic() + seconds)

    def all_of(self, kind: type[T]) -> list[T]:
        return [each for each in self.reports if isinstance(each, kind)]

    def wait_until_armed(self, wanted: ArmedTimeout) -> None:
        def is_armed() -> bool:
            snapshot = self.slot.reading(0).snapshot
            return snapshot is not None and snapshot.sections[0].armed == wanted

        assert self._reactor.run_until(is_armed, time.monotonic() + BOUND_S), self.slot.reading(0)


@pytest.fixture
def launcher(tmp_path: Path, reactor: Reactor) -> Iterator[Launcher]:
    made = Launcher(tmp_path / "s", reactor)
    yield made
    made.slot.ask_to_stop()
    made.slot.end(time.monotonic() + 5.0)


def attached(launcher: Launcher, process: subprocess.Popen[str]) -> None:
    expect(process, "ready")
    launcher.next(Attached)


HANGS = f"{BEGIN}client.start_section('step')\nsay('ready')\n{FOREVER}"


def test_rank_that_writes_over_its_board_is_named_in_one_line_and_never_terminated(launcher: Launcher) -> None:
    script = f"""{BEGIN}say('ready')
client.start_section('step')
words = client._board.words
while True:
    for at in range(len(words)): words[at] = rng.getrandbits(64)
    client._wake_monitor()
    time.sleep(0.05)
    client.end_section('step')
    client.start_section('step')
"""
    with rank(launcher.path, f"import random\nrng = random.Random(3)\n{script}") as process:
        attached(launcher, process)
        launcher.slot.order(Arm(0, {"step": 0.001}))
        launcher.serve(2.0)
        (line,) = launcher.lines
        assert "the progress board of rank 0 was written over by the training process" in line
        assert launcher.slot.reading(0).damaged
        assert launcher.all_of(RankHung) == launcher.all_of(Suspect) == []
        assert process.poll() is None


def test_monitor_that_replaces_another_arms_its_rank_again_counts_and_ends_it(launcher: Launcher) -> None:
    with rank(launcher.path, f"{BEGIN}client._ready().saved()\n{HANGS.removeprefix(BEGIN)}") as process:
        attached(launcher, process)
        launcher.slot.order(Arm(0, {"step": 60.0}))
        wanted = ArmedTimeout(60_000_000_000)
        launcher.wait_until_armed(wanted)
        launcher.next(Intervals)
        before = launcher.slot.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        launcher.serve(0.5)
        assert launcher.slot.pid not in (None, before)
        board = launcher.slot._board
        assert board is not None
        board.words[layout.slot(0) + layout.S_ARMED] = 1
        assert launcher.next(Intervals).seen["step"].longest_s > 0
        launcher.wait_until_armed(wanted)
        launcher.slot.order(Arm(0, {"step": 0.3}))
        launcher.next(Suspect)
        launcher.slot.order(ExtendTimeout(0))
        verdict = launcher.next(RankHung)
        assert (verdict.observed_only, verdict.enforced, verdict.learned) == (False, True, True)
        launcher.slot.order(Release(0))
        assert process.wait(BOUND_S) == -signal.SIGKILL
