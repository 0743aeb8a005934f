"""One chaos run on three hosts, network namespaces of this machine, whose scheduler starts again what has ended."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.chaos.check import Launch, Seen
from tests.chaos.one import LAUNCH_S, MEGATRON, TIMEOUTS, Run, next_order, signal_all, training
from tests.chaos.plan import HOSTS, KILLING, Event, Plan
from tests.support.campaigns import launcher_records
from tests.support.launching import command_line, marked
from tests.support.netns import Hosts

__all__ = ["HostsRun"]

_HOST = "FT_CHAOS_HOST"
_STARTED_AGAIN_S = 0.5
_MOST_LAUNCHES = 20
_CUT_S = {"cut_for_a_moment": 1.0, "cut_for_long": 12.0, "host_off": 9.0}


class HostsRun(Run):
    """Nodes meet at host 1. It is one job, whichever host is lost: all of ``Seen.launches`` have the number 0."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, clock_library=None)
        self._hosts = Hosts(self.directory, HOSTS)
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._started: list[tuple[int, Path]] = []
        """Host, and logs."""
        self._codes: dict[int, int | None] = {}
        """By number of the launch."""
        self._heal_at: dict[int, float] = {}
        self._start_at: dict[int, float] = {}

    def __enter__(self) -> HostsRun:
        super().__enter__()
        self._hosts.up()
        return self

    def __exit__(self, *more: object) -> None:
        super().__exit__(*more)
        for process in self._running.values():
            process.wait()
        self._hosts.down()

    def perform(self, undisturbed: str) -> Seen:
        """Until each host's last launcher has ended well."""
        self._start_at = dict.fromkeys(range(1, HOSTS + 1), 0.0)
        end = time.monotonic() + LAUNCH_S
        while (self._running or self._start_at) and time.monotonic() < end and len(self._started) < _MOST_LAUNCHES:
            if select.select([self._orders], [], [], 0.02)[0]:
                self.obey()
            now = time.monotonic()
            for host in [host for host, at in self._heal_at.items() if at <= now]:
                del self._heal_at[host]
                self._hosts.heal(host)
            for host in [host for host, at in self._start_at.items() if at <= now and host not in self._heal_at]:
                del self._start_at[host]
                self._start(host)
            for number, process in list(self._running.items()):
                if process.poll() is not None:
                    self._codes[number] = process.returncode
                    del self._running[number]
                    if process.returncode != 0:
                        self._start_at[self._started[number][0]] = now + _STARTED_AGAIN_S
        if self._running:
            self._kill_all()  # nobody waits for ever
        launches = [self._read(number) for number in range(len(self._started))]
        return self.seen(launches, undisturbed, self.left())

    def left(self) -> list[str]:
        """Of a host whose processes are all killed, the run directory is left: there is nobody to remove it."""
        left = super().left()
        for event in self.plan.events:
            directory = next((what for what in left if what.startswith("file megatron_ft-")), None)
            if event.fault in KILLING and directory is not None:
                left.remove(directory)
        return left

    def _start(self, host: int) -> None:
        number = len(self._started)
        logs = self.directory / f"logs-{number}"
        self._started.append((host, logs))
        own = {
            _HOST: f"{self.directory.name}-{host}",
            **({"FT_SECRET": "the secret of a chaos campaign"} if self.plan.memory else {}),
        }
        command = [*self._hosts.enter(host), sys.executable, "-m", "megatron_ft.launcher", "--nproc-per-node=1"]
        command += [f"--nnodes={HOSTS}", "--max-restarts=10", f"--ft-log-dir={logs}", "--rdzv-backend=c10d"]
        command += ["--rdzv-endpoint=node1:29500", "--rdzv-id=chaos", *TIMEOUTS, f"--ft-preload={MEGATRON}"]
        with (self.directory / f"launch-{number}-host{host}.err").open("wb") as stream:
            self._running[number] = subprocess.Popen(
                [*command, *training(self.plan, self.directory)],
                cwd=self.directory,
                env={**self.environment(0), **own},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def _read(self, number: int) -> Launch:
        host, logs = self._started[number]
        return Launch(number=0, host=host, code=self._codes.get(number), records=launcher_records(logs))

    def obey(self) -> None:
        with next_order(self._orders) as order:
            if order is None:
                return
            host = next((host for host in range(1, HOSTS + 1) if order["pid"] in self._pids(host)), None)
            if host is not None:  # else who asked is gone already: there is nothing to do
                self.hits[order["number"]] += self._do_to(host, self.plan.events[order["number"]])

    def _do_to(self, host: int, event: Event) -> int:
        """How many processes and networks it hit."""
        hits = 0
        if event.fault in _CUT_S:
            self._hosts.cut(host)
            hits += 1
            self._heal_at[host] = time.monotonic() + _CUT_S[event.fault]
        if event.fault in ("host_killed", "host_off"):
            # also those that they start meanwhile
            while pids := self._pids(host):
                hits += signal_all(pids, signal.SIGKILL)
                time.sleep(0.01)
        elif event.fault == "launcher_lost":
            launcher = next(n for n, process in self._running.items() if self._started[n][0] == host)
            self._running[launcher].kill()
            hits += 1
        elif event.fault == "keeper_killed":
            own = set(self._pids(host))
            hits += signal_all([pid for pid in self._keepers() if pid in own], signal.SIGKILL)
        elif event.fault == "coordinator_killed":
            hits += signal_all(self._coordinators(), signal.SIGKILL)
        elif event.fault == "host_suspended":
            pids = self._pids(host)
            hits += signal_all(pids, signal.SIGSTOP)
            time.sleep(self._chance.uniform(0.2, 2.5))
            signal_all(pids, signal.SIGCONT)
        return hits

    def _coordinators(self) -> list[int]:
        """On whichever host."""
        return [stat.pid for stat in marked(self.mark) if "--owner" in command_line(stat.pid)]

    def _pids(self, host: int) -> list[int]:
        return [stat.pid for stat in marked(f"{_HOST}={self.directory.name}-{host}")]
