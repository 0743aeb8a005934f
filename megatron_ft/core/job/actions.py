"""The events that the machines of the control plane take, and the effects that they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ft.core.job.decisions import Assignment
from megatron_ft.core.job.messages import FromMember, Moved, OfCycle, PrintJobLines, Tell, ToMember, Verdict

# -- the coordinator ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heard:
    """A message came. ``link`` numbers connections, and is never used again."""

    link: int
    message: FromMember


@dataclass(frozen=True, slots=True)
class Broken:
    """A connection ended. ``silent``: no end of it came, only nothing any more; ``reset``: nobody has closed it."""

    link: int
    silent: bool = False
    reset: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """Send one message to each of these."""

    links: Sequence[int]
    message: ToMember


@dataclass(frozen=True, slots=True)
class Drop:
    """Close a connection."""

    link: int


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision has been made: for the log, and for checks that no other coordinator makes another one."""

    held: Assignment
    members: tuple[str, ...]
    """Participants by place; empty if unknown to this coordinator."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A cycle is over: for the log."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Quit:
    """No launcher needs this coordinator any more."""


CoordinatorEvent = Heard | Broken
CoordinatorEffect = Send | Drop | Decided | Judged | Quit

# -- a launcher's side ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect to ``host:port``, and give up the connection before, if there is one."""

    address: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the connection."""


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send a message on the connection."""

    message: FromMember


@dataclass(frozen=True, slots=True)
class Announce:
    """Send this to ``host:port`` on a connection of its own, if a process listens there; may replace the last."""

    address: str
    moved: Moved


@dataclass(frozen=True, slots=True)
class KillCoordinators:
    """This launcher is about to vote at another coordinator: first kill those that it has started.

    Its own could count it as one that has left, when the launcher ends, and decide without a vote given elsewhere.
    """

    address: str
    """Address of the coordinator that this launcher votes at: one there stays."""


@dataclass(frozen=True, slots=True)
class OpenStore:
    """This node is at place 0: open a store for the ranks, and say where with ``Member.store_opened``."""

    held: Assignment


@dataclass(frozen=True, slots=True)
class Begin:
    """A cycle begins: start this node's ranks."""

    held: Assignment


@dataclass(frozen=True, slots=True)
class StandBy:
    """A cycle begins in which this node has no place."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The job goes on without this node, which is excluded: ``Leave`` comes when the job ends."""


@dataclass(frozen=True, slots=True)
class Say:
    """A line for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Leave:
    """This launcher's job is over, with this exit code. ``is_of_all``: so it is for all launchers, and the same."""

    code: int
    text: str = ""
    is_of_all: bool = False


MemberEffect = (
    Connect
    | Disconnect
    | Transmit
    | Announce
    | KillCoordinators
    | OpenStore
    | Begin
    | StandBy
    | LeftOut
    | OfCycle
    | Say
    | Tell
    | PrintJobLines
    | Leave
)
