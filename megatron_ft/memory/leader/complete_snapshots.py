"""Which snapshots of the running cycle all nodes have, and whether all have restored one. Pure."""

from __future__ import annotations

from collections import Counter

from megatron_ft.core.facts.launcher import Cause, CauseKind
from megatron_ft.job.rules.messages import Report
from megatron_ft.job.rules.restart_policy import NodeState
from megatron_ft.memory.rules import lines
from megatron_ft.memory.rules.snapshots import Complete, OfSnapshots, Passed, Restore, Restored, SnapshotKey

_HELD = 2
"""Snapshots that a node has memory for, beside the complete one; without one, for one more."""


class CompleteSnapshots:
    """One cycle's, of so many ``nodes``. A message of a node costs the same in a job of any size."""

    def __init__(self, cycle: int, nodes: int) -> None:
        self._cycle = cycle
        self._nodes = nodes
        self._held: dict[int, tuple[SnapshotKey, ...]] = {}
        """By place, the last that the node has saved, as many as it has memory for."""
        self._at: Counter[SnapshotKey] = Counter()
        """Number of nodes by their newest one."""
        self._have: Counter[SnapshotKey] = Counter()
        """Number of nodes that hold it, of those that may still become complete."""
        self._complete: Complete | None = None
        self._passed: Passed | None = None
        self._restored: set[int] = set()
        self.is_read = False
        """A rank has restored what was chosen for the cycle."""
        self._mixed: tuple[int, Report] | None = None
        """Place of a node with a rank that began without that, and why the cycle ends if others did with it."""

    @property
    def has_complete(self) -> bool:
        return self._complete is not None

    def saved(self, place: int, key: SnapshotKey) -> OfSnapshots | None:
        """Note that the node at that place holds a snapshot. Return what all nodes are to be told."""
        if not self._holds(place, key):
            return None
        if self._have[key] == self._nodes:
            self._complete = Complete(key)
            self._forget(key)
            return self._complete
        return self._pass()

    def was_complete(self, place: int, key: SnapshotKey) -> Complete | None:
        """Note that another coordinator has told the node at that place so. Return what all nodes are to be told.

        The others may have missed it, and must not give it up.
        """
        self._holds(place, key)
        if key.cycle != self._cycle or (self._complete is not None and key <= self._complete.key):
            return None
        self._complete = Complete(key)
        self._forget(key)
        return self._complete

    def _holds(self, place: int, key: SnapshotKey) -> bool:
        """Note it; returns whether that is news."""
        held = self._held.get(place, ())
        if key.cycle != self._cycle or (held and key <= held[-1]):
            return False
        most = _HELD + (self._complete is None)
        for gone in held[: 1 - most]:
            _take_one(self._have, gone)
        self._held[place] = (*held[1 - most :], key)
        self._at[key] += 1
        if self._complete is None or key > self._complete.key:
            self._have[key] += 1
        if held:
            _take_one(self._at, held[-1])
        return True

    def _pass(self) -> Passed | None:
        """Return the oldest of the nodes' newest snapshots, if it passes over an incomplete one."""
        oldest = min(self._at)
        if len(self._held) < self._nodes or not any(key <= oldest for key in self._have):
            return None
        self._forget(oldest)
        self._passed = Passed(oldest)
        return self._passed

    def _forget(self, key: SnapshotKey) -> None:
        for each in [each for each in self._have if each <= key]:
            del self._have[each]

    def with_complete(self, answer: OfSnapshots) -> list[OfSnapshots]:
        """Return what all nodes are told, in this order.

        A node whose connection is new may have missed what is complete, and would give that up with what is passed.
        """
        return [self._complete, answer] if isinstance(answer, Passed) and self._complete is not None else [answer]

    def missed(self, waiting: tuple[SnapshotKey, ...]) -> list[OfSnapshots]:
        """Return the answers for a node that has ``waiting`` snapshots, and may have missed them."""
        answers = [each for each in (self._complete, self._passed) if each is not None]
        return [each for each in answers if any(key <= each.key for key in waiting)]

    def restored(self, place: int, restored: Restored | None, chosen: Restore | None) -> bool:
        """Note that the node at that place has restored what was ``chosen``. Return True if now all have.

        ``restored`` None: so it had told another coordinator, which then may have said so.
        """
        if chosen is None or place in self._restored:
            return False
        if restored is None:
            self._restored.add(place)
            self.is_read = True
            return False
        if (restored.cycle, restored.key) != (self._cycle, chosen.key):
            return False
        if restored.without is not None:
            text = lines.mixed(restored.without, chosen.key.iteration)
            cause = Cause(kind=CauseKind.CRASH, text=text, rank=restored.without)
            self._mixed = self._mixed or (place, Report(self._cycle, NodeState.UNHEALTHY, cause, is_mixed=True))
            return False
        self.is_read = True
        if restored.is_whole:
            self._restored.add(place)
        return len(self._restored) == self._nodes

    def take_mixed(self) -> tuple[int, Report] | None:
        """Return, once, a node's place and the report that ends the cycle: some ranks have restored, others haven't.

        They train from different iterations.
        """
        mixed = self._mixed if self.is_read else None
        if mixed is not None:
            self._mixed = None
        return mixed


def _take_one(counts: Counter[SnapshotKey], key: SnapshotKey) -> None:
    """Count one node less; nothing changes for what isn't counted any more."""
    if key in counts:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]
