"""Reports of nodes on a cycle and on ranks that hang, or may; and the coordinator's verdict. Pure.

These are messages, or parts of them: the rest is in `core.job.messages`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from megatron_ft.core.diagnosis.cycle_cause import Cause, CauseKind, HangVerdict
from megatron_ft.core.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.core.diagnosis.rerun import WANTS_ANOTHER_GPU, Rerun
from megatron_ft.core.job import lines
from megatron_ft.core.job.restart_policy import Action, NodeState, Outcome, Reached, RestartDecision
from megatron_ft.core.job.rotation import Rotation


class NodePhase(enum.Enum):
    """Phase of a node."""

    BUSY = "busy"
    """Neither in a running cycle nor ready for the next one: its ranks end, or its health is being checked."""
    RUNNING = "running"
    READY = "ready"
    ASIDE = "aside"
    """Its health check has failed: the others don't wait for it."""
    EXCLUDED = "excluded"
    """Left out for good; the launcher stays until the job ends."""


@dataclass(frozen=True, slots=True)
class Report:
    """A node's state in a cycle; ``text`` says why, ``kind`` (of cause), ``rank`` and the rest where a rank did it.

    Args:
        follows: a rank failed only because it had lost one of another node.
        reached: how far the node's ranks had got; None where that isn't known.
        rerun: what Megatron's rerun state machine ended its ranks for; None if something else did.
        ranks: the number of its ranks, where ``rerun`` is given.
    """

    cycle: int
    state: NodeState
    text: str = ""
    kind: CauseKind | None = None
    rank: int | None = None
    follows: bool = False
    reached: Reached | None = None
    rerun: Rerun | None = None
    ranks: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a cycle ended, and what follows.

    Args:
        text: why, without the node.
        node: the place of the node that caused it, None if none did; its host is ``name``.
        nodes: so many took part.
        names_nodes: ``text`` says itself which nodes it is about.
        code: the launchers' exit code, if there is no other cycle.
        stopped: it has succeeded, but nodes were asked to stop: there may be more to train.
        rerun: what Megatron's rerun state machine ended the ranks for; None if something else did.
        rotation: who changes places in the next cycle because of it.
    """

    cycle: int
    outcome: Outcome
    text: str
    action: Action
    restarts_left: int
    reason: str = ""
    no_progress: bool = False
    kind: CauseKind = CauseKind.MEMBERSHIP
    node: int | None = None
    name: str = ""
    nodes: int = 1
    names_nodes: bool = False
    rank: int | None = None
    iteration: int | None = None
    detail: str = ""
    code: int = 0
    stopped: bool = False
    rerun: Rerun | None = None
    rotation: Rotation = Rotation.NONE

    def cause(self, place: int | None) -> Cause:
        """Why, in the words for the node that has that place (None: for one that has none)."""
        text, node = self.text, self.node
        if node is not None and node != place and self.nodes > 1 and not self.names_nodes:
            tell = lines.on if self.outcome is Outcome.STOPPED else lines.at
            text = tell(node, self.name, text)
        return Cause(
            kind=self.kind, text=text, rank=self.rank, iteration=self.iteration, detail=self.detail, host=self.name
        )

    def decision(self) -> RestartDecision:
        """Return the decision after the cycle."""
        return RestartDecision(
            action=self.action,
            restarts_left=self.restarts_left,
            reason=self.reason,
            no_progress=self.no_progress,
            change=lines.rotation(self.rotation) if self.rerun in WANTS_ANOTHER_GPU else "",
        )


@dataclass(frozen=True, slots=True)
class Standing:
    """How a node stands, for a coordinator that has just taken over.

    Args:
        cycle: the one that ``report`` and ``ended`` are of; -1 before the first.
        ended: the coordinator has ended that cycle for all nodes, in this way.
        verdict: why, if that was sent, too.
    """

    phase: NodePhase = NodePhase.BUSY
    cycle: int = -1
    report: Report | None = None
    ended: Outcome | None = None
    verdict: Verdict | None = None
    shutdown: str = ""
    """A rank of this node has asked for the end of the job, in these words."""
    raised: tuple[str, ...] = ()
    """Names of the learned timeouts that have ended ranks of any node in that cycle, as far as this node knows."""

    def after_end(self, outcome: Outcome | None, text: str) -> Standing:
        """When its cycle has ended. ``outcome`` None: the others have given up this node alone, because of ``text``."""
        phase = NodePhase.BUSY if self.phase is NodePhase.RUNNING else self.phase
        if outcome is not None:
            return replace(self, phase=phase, ended=outcome)
        # another coordinator mustn't take this node for one that trains
        return replace(self, phase=phase, report=Report(self.cycle, NodeState.UNHEALTHY, text, follows=True))


@dataclass(frozen=True, slots=True)
class Hang:
    """A rank of this node was found hung: every node is to collect evidence. ``passive``: the ranks run on.

    ``decides``: the result decides which ranks are terminated; their nodes do that.
    """

    cycle: int
    verdict: HangVerdict
    reached: Reached | None = None
    passive: bool = False
    decides: bool = False


@dataclass(frozen=True, slots=True)
class Notes:
    """Snapshots of a node's ranks. ``passive``: as in the `Collect` before; ``more``: further ones follow."""

    cycle: int
    notes: tuple[RankSnapshot, ...]
    passive: bool = False
    more: bool = False


@dataclass(frozen=True, slots=True)
class Suspected:
    """A learned timeout is over on this node: all others, to which the coordinator sends it, are to check progress."""

    cycle: int
    between_s: float


@dataclass(frozen=True, slots=True)
class Moving:
    """A rank of this node makes progress, and what it does, in words; the coordinator tells the others."""

    cycle: int
    progress: str


@dataclass(frozen=True, slots=True)
class Reviewed:
    """Result of an observe-only diagnosis: why no collective completes, or why an interval lasts.

    Args:
        asker: the place of the node that had asked for it.
        text: which rank keeps the others waiting and where it is, and what they do; or that none waits.
        rank: that rank; None if it isn't known.
        is_waited: some rank waits in a collective.
        timed: what exceeded its learned timeout, a section or a kind; empty if no collective completes.
        iteration: that of the rank which was found first; where the review decides, that of ``rank``.
        decides: the nodes are to terminate the ranks that hang, and no other.
        hanging: these ranks; empty if the evidence doesn't show them. Only where the review decides, as ``kind`` and
            ``section``, what is overdue on ``rank``.
    """

    cycle: int
    asker: int
    elapsed_s: float
    timeout_s: float
    text: str
    rank: int | None = None
    is_waited: bool = False
    timed: str = ""
    iteration: int | None = None
    decides: bool = False
    hanging: tuple[int, ...] = ()
    kind: str = ""
    section: str | None = None
