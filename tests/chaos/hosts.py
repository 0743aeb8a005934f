"""Chaos among hosts: three launchers on three virtual hosts, a real etcd on a fourth, and what is done to them."""

from __future__ import annotations

import random
import re
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tests.chaos import check, job
from tests.chaos.one import Run, signal_all
from tests.chaos.plan import Event, Plan
from tests.support.campaigns import launcher_records, read_records
from tests.support.etcd_server import EtcdServer
from tests.support.launching import Launched
from tests.support.netns import Hosts
from tests.support.nodes import coordinator_of

HOSTS, ETCD = (1, 2, 3), 4
RUN_S = 150.0
_GONE = r".*(its launcher exited|no (message|packet) from its)"


class Fault(NamedTuple):
    """How many cycles it may end, between how many seconds it lasts, and the cause if it is the only fault."""

    ends: int
    seconds: tuple[float, float] = (0.0, 0.0)
    cause: str = ""


FAULTS = {
    "rank_killed": Fault(1, cause=r".*rank \d killed by SIGKILL"),
    "rank_hung": Fault(1, cause=r".*(rank \d.* hung|hang detected)"),
    "launcher_killed": Fault(2, (0.3, 4.0), _GONE),
    "leader_killed": Fault(0),
    "host_lost": Fault(2, (1.0, 8.0), _GONE),
    "launcher_stopped": Fault(0, (3.0, 12.0)),
    "link_down": Fault(2, (2.0, 8.0)),
    "all_links_down": Fault(4, (2.0, 8.0)),
    "etcd_stopped": Fault(0, (5.0, 25.0)),
    "etcd_killed": Fault(0, (5.0, 25.0)),
}


def draw(seed: int) -> Plan:
    """One to three faults, in the order of iterations. ``layout`` is --nnodes, and how often."""
    chance = random.Random(f"hosts {seed}")
    layout, events = chance.choice(("2:3", "2:3", "2:3, 2", "2", "2", "3", "3", "3")), list[Event]()
    # of 40 iterations: later faults might find a job that has ended
    for iteration in sorted(chance.randint(1, 28) for _ in range(chance.choice((1, 2, 2, 3)))):
        is_away = any("etcd" in event.fault for event in events)  # then what calls for a decision is worth more
        fault = chance.choice([name for name, each in FAULTS.items() if not is_away or each.cause or "leader" in name])
        host = "the leader's" if fault == "leader_killed" or chance.random() < 0.5 else f"node{chance.choice(HOSTS)}"
        more = {"phase": host, "iteration": iteration, "seconds": chance.uniform(*FAULTS[fault].seconds)}
        events.append(Event(fault=fault, launch=0, cycle=0, rank=0, **more))
    return Plan(seed=seed, layout=layout, preload="none", learns=False, events=tuple(events))


class HostsRun(Run):
    """``clock_library``: of no use here."""

    _forks = threading.Lock()

    def __enter__(self) -> HostsRun:
        super().__enter__()
        self._launched: list[tuple[int, Launched]] = []
        """Hosts, and launchers, of the use of the name that runs."""
        self._killed: list[Launched] = []
        self._later: list[tuple[float, Callable[[], object]]] = []
        self._net = Hosts(self.directory, ETCD)
        self._net.up()
        enter = self._net.enter(ETCD)
        self._etcd = EtcdServer(self.directory, "--unsafe-no-fsync", host=f"198.18.77.{ETCD}", prefix=enter)
        return self

    def __exit__(self, *more: object) -> None:
        for _, node in self._launched:
            node.destroy()
        self._etcd.kill()
        self._net.down()
        super().__exit__(*more)

    def perform(self, undisturbed: str) -> check.Seen:
        """One use of the name, or two."""
        launches, left, weights, missed = list[check.Launch](), list[str](), set[str](), set[int]()
        for use in (0, 1) if ", 2" in self.plan.layout else (0,):
            self._use, self._launched, save = use, [], self.directory / f"save-{use}"
            save.mkdir()
            missed |= self._train(save, () if use else self.plan.events)
            for host, node in self._launched:
                code, records = node.process.poll(), launcher_records(node.log_dir)
                try:
                    if code is not None:
                        node.assert_nothing_left()
                except AssertionError as error:
                    left.append(f"of node{host}, {error}"[:300])
                launches.append(check.Launch(number=host * (node not in self._killed), code=code, records=records))
                node.destroy()
            weights.add((save / "weights").read_text() if (save / "weights").exists() else "not there")
        trace = list(read_records(self.directory / "trace.jsonl"))
        how = {"undisturbed": undisturbed, "left": left, "missed": missed, "weights": " and ".join(weights)}
        return check.Seen(plan=self.plan, launches=launches, trace=trace, **how)

    def _train(self, save: Path, events: Sequence[Event]) -> set[int]:
        """Start launchers, and do to them what is due; the faults that hit nothing."""
        for host in HOSTS:
            self._start(host, save)
        due, missed, end = list(enumerate(events)), set[int](), time.monotonic() + RUN_S
        while any(node.process.poll() is None for _, node in self._launched) or self._later:
            if time.monotonic() > end:
                break
            time.sleep(0.02)
            for later in [each for each in self._later if each[0] <= time.monotonic()]:
                self._later.remove(later)
                later[1]()
            steps = [each["iteration"] for each in self._trace() if each["what"] == "step"] if due else []
            while due and due[0][1].iteration <= max(steps, default=-1):
                number, event = due.pop(0)
                time.sleep(self._chance.uniform(0.0, 0.2))
                self.note(number, event)
                if not self._do(event, save):
                    missed.add(number)
        return missed

    def _start(self, host: int, save: Path) -> None:
        if any(node.process.poll() == 0 for _, node in self._launched):
            return  # the job has ended meanwhile
        directory = self.directory / f"use{self._use}-{len(self._launched)}-node{host}"
        directory.mkdir()
        words = ["--rdzv-backend=etcd", f"--rdzv-endpoint={self._etcd.endpoint}", "--rdzv-id=chaos"]
        words += ["--rdzv-conf=last_call_timeout=2", f"--nnodes={self.plan.layout.split(',')[0]}", "--nproc-per-node=1"]
        words += ["--ft-rank-section-timeouts=setup:30,step:15", "--ft-rank-out-of-section-timeout=15"]
        words += ["--max-restarts=8", str(Path(__file__).with_name("hosts_job.py")), str(self.directory), str(save)]
        env = {job.LAUNCH: str(self._use), "FT_SECRET": "the secret of a chaos campaign"}
        with self._forks:
            self._launched.append((host, Launched(directory, words, env, host=self._net.inhabitant(host))))

    def _do(self, event: Event, save: Path) -> bool:
        """Whether it hit something that runs."""
        nodes = dict(self._launched)  # the last one of each host
        leader = next((host for host, node in nodes.items() if coordinator_of(node)), 1)
        host = int(event.phase.removeprefix("node")) if event.phase.startswith("node") else leader
        node, leads = nodes[host], coordinator_of(nodes[host])
        runs = node.process.poll() is None
        if event.fault in ("launcher_killed", "host_lost"):
            self._killed.append(node)
        match event.fault:
            case "rank_killed" | "rank_hung":
                began = {record["pid"] for record in self._trace() if record["what"] == "began"}
                alive = [stat.pid for each in (node, *nodes.values()) for stat in each.alive() if stat.pid in began]
                if event.fault == "rank_hung" and alive:
                    (self.directory / f"hang-{alive[0]}").touch()
                return bool(alive) and (event.fault == "rank_hung" or signal_all(alive[:1], signal.SIGKILL) > 0)
            case "launcher_killed":
                node.signal(signal.SIGKILL)
                self._after(event, lambda: self._start(host, save))
            case "leader_killed":
                return leads is not None and signal_all([leads], signal.SIGKILL) > 0
            case "host_lost":
                self._net.power_off(host, node)
                self._after(event, lambda: (self._net.heal(host), self._start(host, save)))
            case "launcher_stopped" if runs:
                pids = [node.process.pid] if leads is None else [node.process.pid, leads]
                signal_all(pids, signal.SIGSTOP)
                self._after(event, lambda: signal_all(pids, signal.SIGCONT))
            case "link_down" | "all_links_down":
                cut = [host] if event.fault == "link_down" else [*nodes]
                for each in cut:
                    self._net.cut(each)
                self._after(event, lambda: [self._net.heal(each) for each in cut])
            case "etcd_stopped" | "etcd_killed":
                (self._etcd.pause if event.fault == "etcd_stopped" else self._etcd.kill)()
                self._after(event, self._etcd.resume if event.fault == "etcd_stopped" else self._etcd.start)
        return runs

    def _after(self, event: Event, do: Callable[[], object]) -> None:
        self._later.append((time.monotonic() + event.seconds, do))

    def _trace(self) -> list[dict[str, Any]]:
        return [each for each in read_records(self.directory / "trace.jsonl") if each.get("launch") == self._use]


def _ends(event: Event) -> int:
    """Cycles that it may end. A network that is away for 4 s ends none: a silent node is lost after 6.5 s."""
    return 0 if "down" in event.fault and event.seconds <= 4.0 else FAULTS[event.fault].ends


def problems(seen: check.Seen) -> list[str]:
    found = [*check.the_weights_are_those_of_the_undisturbed_run(seen), *check.nothing_is_left(seen)]
    hit = [seen.plan.events[number] for number in seen.hit()]
    for use, most in enumerate((sum(map(_ends, hit)), 0)):
        trace = [record for record in seen.trace if record.get("launch") == use]
        found += check.nothing_saved_is_redone(replace(seen, trace=trace))
        ended = max((record["cycle"] for record in trace), default=0)
        if ended > most:
            found.append(f"{ended} cycles ended, by faults that end {most} at most")
        worlds = defaultdict(list)
        for record in trace:
            if record["what"] == "began":
                worlds[record["cycle"]].append((record["world"], record["rank"]))
        for cycle, ranks in worlds.items():
            if len({world for world, _ in ranks}) > 1 or len(set(ranks)) < len(ranks):
                found.append(f"cycle {cycle} isn't one world: it ran with (world, rank) {sorted(ranks)}")
    return [*found, *launchers_agree(seen), *causes_are_right(seen), *a_restart_waits_for_etcd(seen)]


def launchers_agree(seen: check.Seen) -> Iterator[str]:
    """That all is well at the end, but for those that were killed, which have no number; and why each cycle failed."""
    for launch in seen.launches:
        if launch.code not in ((0,) if launch.number else (0, -signal.SIGKILL)):
            yield f"the launcher of node{launch.number or ' that was lost'} ended with {launch.code}"
    told = defaultdict(set)
    for _, record in seen.ended():
        if record["outcome"] == "failed":  # a node that comes back hears that it was lost
            cause = record["cause"] or {}
            told[record["cycle"]].add((cause.get("rank"), cause.get("host"), record["action"], record["restarts_left"]))
    yield from (f"of the end of cycle {cycle} is told: {ends}" for cycle, ends in told.items() if len(ends) > 1)


def causes_are_right(seen: check.Seen) -> Iterator[str]:
    """A rank's fault ends a cycle; the only fault is its cause."""
    hit = [seen.plan.events[number] for number in seen.hit()]
    causes = {check._cause(record) for _, record in seen.ended() if record["outcome"] != "succeeded"}
    if any(event.fault.startswith("rank") for event in hit) and not causes:
        yield "the fault of a rank ended no cycle"
    if len(hit) == 1 and causes and not any(re.match(FAULTS[hit[0].fault].cause, cause) for cause in causes):
        yield f"{hit[0].fault} is the only fault, but the causes are {causes}"


def a_restart_waits_for_etcd(seen: check.Seen) -> Iterator[str]:
    """No leader decides without it, as one would have if steps of the cycle before were done after it was away."""
    for fault in (record for record in seen.trace if record["what"] == "fault"):
        event = seen.plan.events[fault["number"]]
        begun = [record for record in seen.trace if record["what"] == "began" and "etcd" in event.fault]
        for cycle in {each["cycle"] for each in begun if 0 < each["t"] - fault["t"] < event.seconds * 1e9}:
            if any(r["t"] > fault["t"] and r["cycle"] == cycle - 1 for r in seen.trace if r["what"] == "step"):
                yield f"cycle {cycle} began while etcd was away"
