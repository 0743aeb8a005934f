"""The events that the machines of the control plane take, and the effects that they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ft.job.rules.decisions import Assignment, DecisionRecord
from megatron_ft.job.rules.messages import FromMember, OfCycle, ToMember, Verdict

# -- the leader -----------------------------------------------------------------------------------------------


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
    """A decision has been made: give its record to the launcher that holds the lock, before anybody hears of it."""

    record: DecisionRecord


@dataclass(frozen=True, slots=True)
class BeginLife:
    """The decisions in etcd are those of an earlier run: forget them before anything that follows is said."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A cycle is over: for the log."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Quit:
    """No launcher needs this leader any more."""


CoordinatorEvent = Heard | Broken
CoordinatorEffect = Send | Drop | Decided | BeginLife | Judged | Quit

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
class OpenStore:
    """This node is ready: open a store for the ranks of the next cycle, and say where with ``Member.store_opened``."""


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
    """A line for the user. ``is_copy``: another launcher of the job prints it."""

    text: str
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class PrintsJobLines:
    """This launcher prints the lines about the whole job from now on, or another one does."""

    is_printer: bool


@dataclass(frozen=True, slots=True)
class Leave:
    """This launcher's job is over, with this exit code. ``is_of_all``: so it is for all launchers, and the same."""

    code: int
    text: str = ""
    is_of_all: bool = False


MemberEffect = (
    Connect | Disconnect | Transmit | OpenStore | Begin | StandBy | LeftOut | OfCycle | Say | PrintsJobLines | Leave
)
