"""The launchers that are connected to the coordinator, as it knows them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from megatron_ft.job.rules.decisions import Assignment
from megatron_ft.job.rules.messages import Hello, NodePhase, NodeStatus
from megatron_ft.job.rules.restart_policy import JobProgress
from megatron_ft.memory.rules.snapshots import Kept

GRACE_S = 0.3
"""A launcher whose connection has ended is dead, or back within this time."""


@dataclass(slots=True, eq=False)
class Node:
    """One launcher, connected or missing for a moment only. Times are those of the coordinator's own clock."""

    instance: str
    name: str
    host: str
    """Address of its host for other nodes."""
    rank: int | None
    owns: bool
    arrived: int
    link: int | None = None
    session: int = -1
    heard_s: float = 0.0
    gone_s: float = 0.0
    silent: bool = False
    was_reset: bool = False
    phase: NodePhase = NodePhase.BUSY
    before: JobProgress = JobProgress()  # noqa: RUF009 - frozen
    """How far earlier lives of the job have got."""
    bad: str = ""
    """Why an earlier life of the job reported this host as bad; empty if none did."""
    decided: Assignment | None = None
    """The last decision that the launcher has heard of."""
    standing: NodeStatus = NodeStatus()  # noqa: RUF009 - frozen
    domain: str = ""
    """NVLink domain, where segments of nodes must share one."""
    place: int | None = None
    """In the last cycle."""
    since: int = 0
    """Revision of etcd's store when the launcher was started."""
    progress_s: float | None = None
    """Time of the last progress of its ranks in the last cycle; None if none was seen."""

    @staticmethod
    def of(hello: Hello, arrived: int) -> Node:
        """A launcher that says hello for the first time."""
        return Node(
            hello.instance,
            hello.name,
            hello.host,
            hello.rank,
            hello.owns,
            arrived,
            before=hello.before,
            domain=hello.domain,
            bad=hello.bad,
            since=hello.since,
        )

    def connected(self, link: int, hello: Hello, now_s: float) -> None:
        """Take over a hello: connection, session, and everything the launcher remembers."""
        self.link, self.session, self.heard_s, self.owns = link, hello.session, now_s, hello.owns
        self.decided, self.standing, self.phase = hello.decided, hello.standing, hello.standing.phase

    def disconnected(self, now_s: float, *, silent: bool, reset: bool = False) -> None:
        """Its connection has ended. ``silent``: no end of it came; ``reset``: its launcher may have given it up."""
        self.link, self.silent, self.was_reset, self.gone_s = None, silent, reset, now_s

    def heard(self, now_s: float) -> None:
        self.heard_s = now_s

    def address_of(self, port: int) -> str:
        """Return the address of a port of this launcher's host; empty if it isn't known."""
        return f"{self.host}:{port}" if self.host else ""

    def seat(self, place: int | None) -> None:
        """Note its place in the last cycle; None: it has none."""
        self.place = place

    def enter(self, phase: NodePhase) -> None:
        self.phase = phase

    def ready(self, kept: Kept, store: str) -> None:
        """Note that the node is ready, what its keeper can restore, and where its store is."""
        self.phase = NodePhase.READY
        self.standing = replace(self.standing, store=store)
        self._keep(kept)

    def stock_taken(self, kept: Kept) -> None:
        """Note what its keeper can restore, as long as no cycle has begun."""
        if self.phase is NodePhase.READY:
            self._keep(kept)

    def _keep(self, kept: Kept) -> None:
        self.standing = replace(self.standing, snapshots=replace(self.standing.snapshots, kept=kept))

    def begin(self, cycle: int) -> None:
        self.phase, self.standing, self.progress_s = NodePhase.RUNNING, NodeStatus(NodePhase.RUNNING, cycle), None

    def progressed(self, at_s: float) -> float:
        """Note a later progress of its ranks; return the seconds since the one before, 0 for the first."""
        before_s, self.progress_s = self.progress_s, at_s
        return 0.0 if before_s is None else at_s - before_s

    def learn(self, decided: Assignment) -> None:
        """Note that the launcher is sent a decision."""
        self.decided = decided
        self.place = decided.place

    def awaited_until_s(self, *, limit_s: float, slept_s: float) -> float:
        """When it counts as lost, if its connection has ended and it isn't back by then.

        Args:
            limit_s: seconds without a message after which a node is silent. A kernel may give a connection up before:
                packets to the node were lost, while those from it came.
            slept_s: until when the leader itself didn't answer.
        """
        if self.silent:
            return max(self.gone_s, self.heard_s + limit_s)
        if self.has_exited(slept_s):
            return self.gone_s + GRACE_S
        return max(self.gone_s, slept_s) + limit_s  # it couldn't connect here any sooner

    def has_exited(self, slept_s: float) -> bool:
        """Whether that its connection has ended means that its process has.

        If the leader itself was paused (until ``slept_s``), the launcher may have given up waiting for an answer.
        """
        return not self.silent and not self.was_reset and self.gone_s > slept_s + GRACE_S
