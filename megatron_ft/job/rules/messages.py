"""Every message between a launcher and the coordinator, defined once; `docs/design/control-plane.md` has their order.

But for those of parts (`PartMessage`).
"""

from __future__ import annotations

import enum
from typing import ClassVar

from msgspec.structs import replace

from megatron_ft.job.rules import job_lines
from megatron_ft.job.rules.decisions import Assignment, DecisionRecord
from megatron_ft.job.rules.restart_policy import (
    JobProgress,
    NodeState,
    Outcome,
    Reached,
    RestartDecision,
    Rotation,
    Rules,
)
from megatron_ft.link.base.codec import NO_PARTS, Finite, Int, Message, PartMessage, Parts
from megatron_ft.link.facts.launcher import Cause, NodeLost

# -- what nodes report of a cycle, and of ranks that hang, or may; the verdict -----------------------------------


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


class Report(Message, frozen=True):
    """A node's state in a cycle.

    Args:
        cause: why, in one line (``cause.text``); it ``follows`` if a rank failed only because it had lost one of
            another node.
        reached: how far the node's ranks had got; None where that isn't known.
        ranks: the number of its ranks, where Megatron's rerun state machine has ended them (``cause.rerun``).
        is_mixed: a rank couldn't restore what the others have restored: the cycle is over under every policy.
    """

    cycle: Int
    state: NodeState
    cause: Cause = Cause()
    reached: Reached | None = None
    ranks: Int = 0
    is_mixed: bool = False


class Verdict(Message, frozen=True):
    """Why a cycle ended, and what follows.

    Args:
        cause: without the node; ``cause.host`` is that node's name.
        node: the place of the node that caused it, None if none did.
        nodes: so many took part.
        names_nodes: the text of the cause says itself which nodes it is about.
        code: the launchers' exit code, if there is no other cycle.
        stopped: it has succeeded, but nodes were asked to stop: there may be more to train.
        rotation: who changes places in the next cycle because of ``cause.rerun``.
        printer: the launcher (instance) that prints lines about the job from now on: the node at place 0 may be gone.
        reached: how far a cycle got that failed, for a coordinator that takes over when that node is lost, too.
    """

    cycle: Int
    outcome: Outcome
    cause: Cause
    decision: RestartDecision
    node: Int | None = None
    nodes: Int = 1
    names_nodes: bool = False
    code: Int = 0
    stopped: bool = False
    rotation: Rotation = Rotation.NONE
    reached: Reached | None = None
    printer: str = ""

    def cause_for(self, place: int | None) -> Cause:
        """Why, in the words for the node that has that place (None: for one that has none)."""
        if self.node is None or self.node == place or self.nodes == 1 or self.names_nodes:
            return self.cause
        return replace(self.cause, text=job_lines.at(self.node, self.cause.host, self.cause.text))


class NodeStatus(Message, frozen=True):
    """How a node stands, for a coordinator that has just taken over.

    Args:
        cycle: the one that ``report`` and ``ended`` are of; -1 before the first.
        ended: the coordinator has ended that cycle for all nodes, in this way.
        verdict: why, if that was sent, too.
    """

    phase: NodePhase = NodePhase.BUSY
    cycle: Int = -1
    report: Report | None = None
    ended: Outcome | None = None
    verdict: Verdict | None = None
    shutdown: str = ""
    """A rank of this node has asked for the end of the job, in these words."""
    parts: Parts = NO_PARTS
    store: str = ""
    """Address of the store that this node has opened for the ranks of the next cycle, once the node is ready."""


# -- the job and its leader -----------------------------------------------------------------------------------------


class JobDefinition(Message, frozen=True):
    """Which job a leader is for, by the launcher that starts it; launchers of others are refused."""

    job: str
    rules: Rules


class EtcdSettings(Message, frozen=True):
    """Address of etcd, and the credentials for it."""

    host: str
    port: Int
    protocol: str = "http"
    cacert: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = ""


class LeaderStart(Message, frozen=True):
    """Start of a leader, from the launcher that holds the lock, with the job's secret.

    ``record``: that of the last decision; None: none. ``etcd``: where the lock is, with its epoch and lease, and the
    record; None: the lock is the endpoint's port.
    """

    defined: JobDefinition
    secret: bytes | None = None
    record: DecisionRecord | None = None
    etcd: EtcdSettings | None = None
    epoch: Int = 0
    lease: str = ""


# -- from a launcher ------------------------------------------------------------------------------------------


class Hello(JobDefinition, frozen=True):
    """First message of a launcher on each connection; one of another job, or with other rules, is refused.

    Args:
        job: what tells this job from all others.
        instance: the launcher's unique id.
        name: of its host; host: address of its host for others, empty if there are no others.
        rank: the place it is meant to have, by the command line or the scheduler; None if neither gives one.
        before: how far earlier lives of the job have got, as this launcher's log directory says.
        domain: of NVLink, if the rules have segments.
        bad: why earlier lives of the job call its host a bad node; empty if they don't.
        names_life: ``job`` contains the scheduler's identifier of this life of the job.
        since: revision of etcd's store when the launcher was started; 0 without etcd.
        owns: the launcher has started this very leader, and holds the lock.
        decided: the last decision that it has heard of.
        up_s: seconds since the launcher was started.
    """

    instance: str
    name: str
    host: str = ""
    rank: Int | None = None
    before: JobProgress = JobProgress()
    domain: str = ""
    bad: str = ""
    names_life: bool = False
    since: Int = 0
    owns: bool = False
    decided: Assignment | None = None
    standing: NodeStatus = NodeStatus()
    up_s: Finite = 0.0

    @property
    def is_fresh(self) -> bool:
        """True if the launcher knows of no decision and its node isn't excluded: it may found a job."""
        return self.decided is None and self.standing.phase is not NodePhase.EXCLUDED


class Identity(Hello, frozen=True, kw_only=True):
    """Identity of a launcher, as it knows it itself. It is sent as a hello: a leader skips what that hasn't.

    Args:
        endpoint: where the leader listens, or etcd.
        started_s: when the launcher was started, by the clock of its `Member`.
        is_named: the user or a scheduler has named the job: it is no other one, even if this launcher never trains.
        is_here: the endpoint is this machine; of several launchers there, one gets the port.
        has_known_host: the endpoint is known to be on a host of the job: nobody there is no mistake of the user.
        is_in_etcd: the leader's address is in etcd.
    """

    NAME: ClassVar[str] = "hello"
    endpoint: str
    started_s: Finite = 0.0
    is_named: bool = True
    is_here: bool = False
    has_known_host: bool = True
    is_in_etcd: bool = False


class Ready(Message, frozen=True):
    """This node would take part in the next cycle; none of its ranks is left. Sent again if the status changes.

    ``parts``: their status; ``store``: where the ranks of the cycle meet, if it gets place 0.
    """

    parts: Parts = NO_PARTS
    store: str = ""


class NodeUnfit(Message, frozen=True):
    """This node isn't fit, and is to be done without."""

    text: str


class Shutdown(Message, frozen=True):
    """A rank of this node asked for the end of the job."""

    text: str


GOODBYE_S = 1.0
"""Seconds to wait for the answer to a goodbye: until the others have received why this node leaves."""


class Goodbye(Message, frozen=True):
    """This node leaves, and never comes back. It waits for its ``Dismiss``, or ``Stay``.

    Args:
        excluded: it is left out, which costs no restart: a rank asked for that, or it can't end its ranks. Else it was
            stopped.
        code: its launcher's exit code, if the job goes on without it; 0 also if all its ranks have ended with 0.
        failed: its launcher can't go on.
    """

    text: str
    excluded: bool = False
    code: Int = 1
    failed: bool = False


class Beat(Message, frozen=True):
    """This end is alive: the leader answers the launcher's, and a launcher one that has a ``number``.

    The leader asks so before it decides: a decision names only launchers that answered after their `Ready`.
    ``progress_s``: seconds since the last progress of the node's ranks in this cycle; None if none was seen.
    """

    number: Int = 0
    progress_s: Finite | None = None


ANSWER = Beat()
"""The leader's answer to a launcher's beat."""


# -- from the coordinator -------------------------------------------------------------------------------------


class Admitted(Message, frozen=True):
    """The answer to `Hello`: this leader has let the launcher in. A launcher obeys only the highest epoch.

    ``epoch``: of the lock in etcd; 0 where the lock is the endpoint's port.
    """

    epoch: Int = 0


class End(Message, frozen=True):
    """The cycle is over: end the ranks. ``lost``: only for this node, which the others have given up.

    ``text``: why they have; or, where the cycle has succeeded, on which nodes it hasn't, if there are any.
    ``by_themselves``: all ranks are ending of their own accord, and some may still complete a checkpoint.
    """

    cycle: Int
    outcome: Outcome
    restarts: bool
    lost: bool = False
    text: str = ""
    by_themselves: bool = False
    is_cut_off: bool = False
    """This launcher says so itself, because no coordinator can be reached."""


class Tell(Message, frozen=True):
    """A line for the user.

    ``printer``: the launcher (instance) that prints lines about the job from now on; empty: it is about this node.
    """

    text: str
    printer: str = ""


class Stay(Message, frozen=True):
    """The job goes on without this node, which is excluded: its launcher connects again, without one, for the end."""


class Dismiss(Message, frozen=True):
    """This launcher's job is over, with this exit code; `MISTAKE_CODE`: the job doesn't take it.

    ``text``: what is wrong with it, or why the job ends.
    """

    code: Int
    text: str = ""
    is_of_all: bool = False
    """True if every launcher gets this message, and says the same of the end by itself."""
    printer: str = ""


NodeMessage = Report | Ready | NodeUnfit | Shutdown | Goodbye | PartMessage
"""Messages of a launcher about its node and its ranks."""
TO_LEADER = Hello | Report | Ready | NodeUnfit | Shutdown | Goodbye | Beat
FromMember = TO_LEADER | PartMessage
OfCycle = End | Verdict | NodeLost | PartMessage
TO_MEMBER = Admitted | Assignment | Stay | Dismiss | Beat | End | Verdict | NodeLost | Tell
ToMember = TO_MEMBER | PartMessage
