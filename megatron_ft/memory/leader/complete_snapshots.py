"""Which snapshots of the running cycle all nodes have, and whether all have restored one. Pure."""

from __future__ import annotations

from collections import Counter

from megatron_ft.job.rules.messages import Report
from megatron_ft.job.rules.restart_policy import NodeState
from megatron_ft.link.facts.launcher import Cause, CauseKind
from megatron_ft.memory.rules import lines
from megatron_ft.memory.rules.snapshots import Restore, Restored, Settled, SnapshotKey


class CompleteSnapshots:
    """Complete snapshots of one cycle. A message of a node costs the same in a job of any size.

    A node holds what it has saved until that is settled.
    """

    def __init__(self, cycle: int, nodes: int, restored: SnapshotKey | None = None) -> None:
        """``restored``: the snapshot that the cycle goes on from, which all nodes have."""
        self._cycle = cycle
        self._nodes = nodes
        self._newest: dict[int, SnapshotKey] = {}
        """The last one that a node has saved, by place."""
        self._at: Counter[SnapshotKey] = Counter()
        """Number of nodes by their newest one."""
        self._have: Counter[SnapshotKey] = Counter()
        """Number of nodes that hold it, of those that aren't settled."""
        self._settled: Settled | None = None
        self._complete = restored
        self._restored: set[int] = set()
        self.is_read = False
        """A rank has restored what was chosen for the cycle."""
        self._mixed: tuple[int, Report] | None = None
        """Place of a node with a rank that began without that, and why the cycle ends if others did with it."""

    @property
    def has_complete(self) -> bool:
        """All nodes have one of this cycle."""
        return self._complete is not None and self._complete.cycle == self._cycle

    def saved(self, place: int, key: SnapshotKey) -> Settled | None:
        """Note that the node at that place holds a snapshot. Return what all nodes are to be told."""
        before = self._newest.get(place)
        if key.cycle != self._cycle or (before is not None and key <= before):
            return None
        self._newest[place] = key
        self._at[key] += 1
        if before is not None:
            self._at[before] -= 1
            if not self._at[before]:
                del self._at[before]
        if self._settled is None or key > self._settled.key:
            self._have[key] += 1
        if self._have[key] == self._nodes:
            return self._settle(key, key)
        oldest = min(self._at)
        if len(self._newest) == self._nodes and any(each <= oldest for each in self._have):
            return self._settle(oldest, self._complete)  # some node has passed over an incomplete one
        return None

    def was_complete(self, place: int, key: SnapshotKey) -> Settled | None:
        """Note that another coordinator has told the node at that place so. Return what all nodes are to be told.

        The others may have missed it, and must not give it up.
        """
        told = self.saved(place, key)
        if key.cycle != self._cycle or (self.has_complete and self._complete is not None and key <= self._complete):
            return told
        return self._settle(key if self._settled is None else max(key, self._settled.key), key)

    def _settle(self, key: SnapshotKey, complete: SnapshotKey | None) -> Settled:
        for each in [each for each in self._have if each <= key]:
            del self._have[each]
        self._complete, self._settled = complete, Settled(key, complete)
        return self._settled

    def missed(self, waiting: tuple[SnapshotKey, ...]) -> Settled | None:
        """Return the answer for a node that has ``waiting`` snapshots, and may have missed it."""
        is_missed = self._settled is not None and any(key <= self._settled.key for key in waiting)
        return self._settled if is_missed else None

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
