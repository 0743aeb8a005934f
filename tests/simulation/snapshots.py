"""Memory checkpoints in a simulated job: toy keepers, and what happened."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_ft.core.agent.turn import AgentPhase
from megatron_ft.core.facts.launcher import RestoreFailed, SnapshotRestored
from megatron_ft.job.rules import actions
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.decisions import Assignment, Decision
from megatron_ft.memory.rules.snapshots import (
    Complete,
    KeeperPort,
    Kept,
    KeptSnapshot,
    Passed,
    Restore,
    Restored,
    Saved,
    SnapshotKey,
)
from tests.simulation.plan import Fault

if TYPE_CHECKING:
    from tests.simulation.job import CoordinatorProcess, Job, Launcher, Trained

__all__ = ["PER_S", "Keeper", "Snapshots"]

PER_S = 10.0
"""Iterations of a second, on all nodes alike."""
_SLOTS = 3
"""Segments of a rank."""
_SAVED = "restored iteration "


@dataclass
class Segment:
    """One rank's state of one iteration."""

    key: SnapshotKey
    world: int
    rank: int
    is_verified: bool = False
    is_rotten: bool = False
    """It has changed since it was verified."""


class Keeper:
    """The keeper of one launcher's node, with its rank: it saves while the rank runs, and restores as it starts."""

    def __init__(self, launcher: Launcher, interval_s: float) -> None:
        self.launcher = launcher
        self._interval_s = interval_s
        self._chance = random.Random(f"{launcher.instance} {launcher.job.snapshots.seed}")
        self._segments: list[Segment] = []
        self._complete: SnapshotKey | None = None
        self._skew_s = self._chance.choice((0.02, 0.1, 0.4))
        self._is_slow = self._chance.random() < 0.3
        self.port = launcher.number + 1 if launcher.job.snapshots.copies else 0
        self._copies: list[Segment] = []
        """Of another node's rank."""
        self._to: Keeper | None = None
        self._copying: Segment | None = None
        self._done: SnapshotKey | None = None
        self._released: SnapshotKey | None = None

    # -- a cycle --------------------------------------------------------------------------------------------------

    def prepare(self, trained: Trained, place: int, world: int, restore: Restore | None) -> None:
        """Drop what the job has left behind, and let the rank restore and save."""
        key = None if restore is None else restore.key
        self._segments = [] if key is None else [each for each in self._segments if each.key <= key]
        self._complete = key
        self._copies = [] if key is None else [each for each in self._copies if each.key == key]
        self._to = self._copying = self._done = self._released = None
        if self.port:
            opened = KeeperPort(trained.cycle, self.port)
            self.launcher.later_in_cycle(self._chance.uniform(0.01, 0.3), lambda: self.launcher.hear(opened))
        if key is not None:
            assert restore is not None
            self._fetch(key, place, world, restore)
            delay_s = self._chance.uniform(0.05, 0.4)
            self.launcher.later_in_cycle(delay_s, lambda: self._restores(trained, key))
        self._save_later(trained, place, world)

    def _fetch(self, key: SnapshotKey, place: int, world: int, restore: Restore) -> None:
        """Get the segment of this place from the node that the decision names, unless it is here."""
        self._segments = [each for each in self._segments if each.rank == place]
        if self._segments:
            return
        for source in restore.sources:
            keeper = self._of_address(source.address)
            found = None if keeper is None else keeper.segment_of(key, place)
            if place in source.ranks and found is not None and not found.is_rotten:
                self._segments = [Segment(key, world, place, is_verified=True)]

    def _of_address(self, address: str) -> Keeper | None:
        """Return the keeper that answers there."""
        launcher = self.launcher
        keepers = (each.keeper for each in launcher.job.launchers if each.is_alive and each.keeper is not None)
        found = next((each for each in keepers if each.port == int(address.rpartition(":")[2])), None)
        return None if found is None or launcher.world.is_cut(launcher.host, found.launcher.host) else found

    def segment_of(self, key: SnapshotKey, rank: int) -> Segment | None:
        all_ = (each for each in (*self._segments, *self._copies) if each.is_verified)
        return next((each for each in all_ if (each.key, each.rank) == (key, rank)), None)

    def _restores(self, trained: Trained, key: SnapshotKey) -> None:
        found = next((each for each in self._segments if each.key == key and each.is_verified), None)
        launcher, log = self.launcher, self.launcher.job.snapshots
        if found is None or found.is_rotten:
            self._segments = [each for each in self._segments if each is not found]
            fault = log.strike("rank_unrestored")
            launcher.hurt(fault, cycle=trained.cycle)
            rank = launcher.agent.cycle.record.ranks[0]
            launcher.hear(RestoreFailed(rank=rank, cycle=trained.cycle, key=key, text="its digest differs"))
            return
        log.restored.append(Restoring(trained.cycle, launcher, key, launcher.world.now_s))
        launcher.hear(SnapshotRestored(cycle=trained.cycle, key=key, seconds=0.1))
        if key == log.poisoned and launcher.member.place == 0:
            launcher.later_in_cycle(0.3, lambda: launcher.rank_fails(log.strike("rank_fails")))

    def _save_later(self, trained: Trained, place: int, world: int) -> None:
        launcher = self.launcher
        at_s = (int(launcher.world.now_s / self._interval_s) + 1) * self._interval_s
        delay_s = at_s - launcher.world.now_s + self._chance.uniform(0.0, self._skew_s) * self._interval_s

        def saves() -> None:
            key = SnapshotKey(trained.cycle, 0, round(PER_S * at_s))
            self._save(trained, key, world, place, launcher.world.now_s + self._interval_s)
            self._save_later(trained, place, world)

        launcher.later_in_cycle(delay_s, saves)

    def _save(self, trained: Trained, key: SnapshotKey, world: int, place: int, until_s: float) -> None:
        """Save once the snapshot before is verified and there is room; if that takes too long this one is skipped."""
        if len(self._segments) >= _SLOTS or not all(each.is_verified for each in self._segments):
            delay_s = 0.05 * self._interval_s
            if self.launcher.world.now_s + delay_s < until_s:
                self.launcher.later_in_cycle(delay_s, lambda: self._save(trained, key, world, place, until_s))
            return
        segment = Segment(key, world, place)
        self._segments.append(segment)
        slowest = 0.95 if self._is_slow else 0.8  # training waits for a slower one
        delay_s = self._chance.uniform(0.05, slowest) * self._interval_s
        self.launcher.later(delay_s, lambda: self._verified(segment))

    def _verified(self, segment: Segment) -> None:
        if segment not in self._segments or segment.is_verified or segment.is_rotten:
            self._segments = [each for each in self._segments if each is not segment or each.is_verified]
            return
        segment.is_verified = True
        launcher = self.launcher
        if launcher.runs():
            self._go_on()
        elif launcher.agent.phase is AgentPhase.READY:
            launcher.hear(m.StockTaken(self.kept()))

    def _go_on(self) -> None:
        """Tell of the newest snapshot, or copy it first, as `CopyKeeping` does."""
        launcher = self.launcher
        cycle = launcher.agent.cycle.record.cycle
        own = [each for each in self._segments if each.is_verified and each.key.cycle == cycle]
        if not own or not launcher.runs():
            return
        newest = max(own, key=lambda each: each.key)
        if self._to is None:
            launcher.hear(Saved(newest.key))
            return
        done, decided = self._done, max(filter(None, (self._complete, self._released)), default=None)
        is_decided = done is None or (decided is not None and decided >= done)
        is_free = self._copying is None and is_decided
        if is_free and all(before is None or newest.key > before for before in (done, decided)):
            self._copying = newest
            complete = self._complete
            delay_s = self._chance.uniform(0.02, 1.2) * self._interval_s
            launcher.later_in_cycle(delay_s, lambda: self._copied(newest, complete))

    def _copied(self, segment: Segment, complete: SnapshotKey | None) -> None:
        """The other node has a copy; or it doesn't answer, and the snapshot counts without one."""
        if segment is not self._copying:
            return
        self._copying, self._done, to = None, segment.key, self._to
        log = self.launcher.job.snapshots
        if to is not None and not segment.is_rotten and to.takes(segment, complete, self.launcher):
            log.copied[segment.key, self.launcher.instance] = to.launcher.instance
        self.launcher.hear(Saved(segment.key))
        self._go_on()

    def takes(self, segment: Segment, complete: SnapshotKey | None, giver: Launcher) -> bool:
        launcher = self.launcher
        is_there = launcher.is_alive and not launcher.world.is_cut(giver.host, launcher.host)
        if not is_there or not launcher.runs() or launcher.agent.cycle.record.cycle != segment.key.cycle:
            return False
        self._copies = [each for each in self._copies if each.rank == segment.rank and each.key == complete]
        self._copies.append(Segment(segment.key, segment.world, segment.rank, is_verified=True))
        return True

    def copies_to(self, address: str) -> None:
        """The coordinator has named the keeper that takes copies."""
        self._to = self._of_address(address)

    def is_complete(self, key: SnapshotKey) -> None:
        """All nodes have it."""
        if any(each.key == key and each.is_verified for each in self._segments):
            self._complete = key
            self._segments = [each for each in self._segments if each.key >= key]
        if any(each.key == key for each in self._copies):
            self._copies = [each for each in self._copies if each.key >= key]
        self._go_on()

    def release(self, key: SnapshotKey) -> None:
        """What isn't complete up to that one isn't needed."""
        needed = {self._complete, None if self._copying is None else self._copying.key}
        self._segments = [each for each in self._segments if each.key > key or each.key in needed]
        self._released = key
        self._go_on()

    def kept(self) -> Kept:
        """All that is verified."""
        found: dict[tuple[SnapshotKey, int], set[int]] = {}
        for each in (*self._segments, *self._copies):
            if each.is_verified:
                found.setdefault((each.key, each.world), set()).add(each.rank)
        snapshots = (KeptSnapshot(key, world, tuple(sorted(ranks))) for (key, world), ranks in found.items())
        return Kept(tuple(snapshots), port=self.port)

    # -- faults ---------------------------------------------------------------------------------------------------

    def replaced(self) -> None:
        """The keeper has died: the launcher has the segments, and the next keeper verifies them again."""
        self._segments = [each for each in self._segments if each.is_verified]
        self._copies, self._copying = [], None
        for each in self._segments:
            each.is_verified = False
            self.launcher.later(self._chance.uniform(0.1, 1.0), lambda each=each: self._verified(each))

    def rots(self) -> None:
        """One of its segments changes."""
        if self._segments:
            self._chance.choice(self._segments).is_rotten = True


@dataclass(frozen=True)
class Restoring:
    """The rank of one node has restored its state."""

    cycle: int
    launcher: Launcher
    key: SnapshotKey
    at_s: float


@dataclass
class Snapshots:
    """What happened in one job."""

    seed: int
    poisons: bool = False
    trouble: Any = None
    """What is done to the world, which takes note of what happens by itself, too."""
    poisoned: SnapshotKey | None = None
    """From which every cycle fails at once."""
    restored: list[Restoring] = field(default_factory=list)
    kept: dict[tuple[str, str], Kept] = field(default_factory=dict)
    """By coordinator and launcher, what that launcher has said last."""
    asked: dict[str, dict[int, Kept]] = field(default_factory=dict)
    """What each place of a cycle had said when it began."""
    known: dict[str, dict[str, Kept]] = field(default_factory=dict)
    """What each launcher had said then, of a place or not."""
    planned: dict[str, Kept] = field(default_factory=dict)
    """What each launcher had said when the last cycle was planned."""
    completed: dict[int, SnapshotKey] = field(default_factory=dict)
    """By cycle, the newest one that a coordinator has called complete."""
    messages: int = 0
    copies: bool = False
    """Nodes keep copies for each other."""
    copied: dict[tuple[SnapshotKey, str], str] = field(default_factory=dict)
    """By snapshot and launcher, which other launcher's keeper has got a copy."""
    wrong: list[str] = field(default_factory=list)

    def strike(self, kind: str) -> Fault:
        """Something happens that isn't in the plan."""
        fault = Fault(at_s=self.trouble.world.now_s, kind=kind, which=len(self.trouble.hit), seconds=0.0)
        self.trouble.hit.append((fault.at_s, kind))
        self.trouble.struck.append(fault)
        return fault

    def heard(self, coordinator: CoordinatorProcess, launcher: str, message: Any) -> None:
        """A coordinator has got a message."""
        match message:
            case m.Hello(standing=standing):
                self.kept[coordinator.name, message.instance] = standing.snapshots.kept
            case m.Ready(kept) | m.StockTaken(kept):
                self.kept[coordinator.name, launcher] = kept
            case Saved() | Restored():
                self.messages += 1

    def plans(self, coordinator: CoordinatorProcess) -> None:
        """A leader asks the nodes of the next cycle for a sign of life."""
        self.planned = {each: kept for (by, each), kept in self.kept.items() if by == coordinator.name}

    def asks(self, launcher: str, held: Assignment) -> None:
        """A leader starts a cycle."""
        if held.place is not None:
            self.asked.setdefault(held.decision.id, {})[held.place] = self.planned.get(launcher, Kept())
            self.known.setdefault(held.decision.id, self.planned)

    def sends(self, job: Job, send: actions.Send) -> None:
        """A coordinator sends something."""
        if isinstance(send.message, Complete | Passed):
            self.messages += 1
        if isinstance(send.message, Complete):
            key = send.message.key
            self.completed[key.cycle] = max(key, self.completed.get(key.cycle, key))
        elif isinstance(send.message, m.Tell) and send.message.text.startswith(_SAVED):
            self._check_line(job, send.message.text)

    def _check_line(self, job: Job, text: str) -> None:
        """The line names no cycle: a coordinator that was frozen may say what is true of an earlier one."""
        have = {
            made.decision.cycle: {each.launcher for each in self.restored if each.cycle == made.decision.cycle}
            for made in job.made
            if (restore := made.decision.restore) is not None
            if text.startswith(f"{_SAVED}{restore.key.iteration} from memory")
        }
        if not have:
            self.wrong.append(f"'{text}' is said, and no cycle restores that")
        elif not any(
            len(have[made.decision.cycle]) >= made.decision.world for made in job.made if made.decision.cycle in have
        ):
            self.wrong.append(f"'{text}' is said, and not all nodes of a cycle have restored that")

    def begins(self, decision: Decision) -> None:
        """A cycle was decided."""
        if self.poisons and self.poisoned is None and decision.restore is not None:
            self.poisoned = decision.restore.key
