"""Effects of the control plane's machines. Those that are messages or decisions are the messages and decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from megatron_ft.job.rules.decisions import Assignment, DecisionRecord
from megatron_ft.job.rules.messages import Dismiss, FromMember, OfCycle, Stay, Tell, ToMember

# -- the leader -----------------------------------------------------------------------------------------------


class Send(Struct, frozen=True):
    """Send one message to each of these. (A `Struct` is made faster: there is one for each beat.)"""

    links: Sequence[int]
    message: ToMember


@dataclass(frozen=True, slots=True)
class Drop:
    """Close a connection."""

    link: int


@dataclass(frozen=True, slots=True)
class Quit:
    """No launcher needs this leader any more."""


CoordinatorEffect = Send | Drop | DecisionRecord | Quit
"""A record is that of a new decision: the launcher that holds the lock gets it before any other hears of it."""

# -- a launcher's side ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connect:
    """Close the connection, if there is one, and connect to ``host:port``, if that is given."""

    address: str = ""


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send a message on the connection."""

    message: FromMember


@dataclass(frozen=True, slots=True)
class OpenStore:
    """This node is ready: open a store for the ranks of the next cycle, and say where with ``Member.store_opened``."""


OfMember = Assignment | Stay | OfCycle | Tell | Dismiss
"""For the agent: a cycle begins, with a place for this node or without; the job goes on without this node, which is
excluded; news of the cycle; a line for the user; and this launcher's end."""
MemberEffect = Connect | Transmit | OpenStore | OfMember
