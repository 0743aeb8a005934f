"""Records of a rank's monitor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from megatron_ft.link.base.codec import Count, Cycle, Fact, Int, Moment, Pid, Rank, Seconds
from megatron_ft.link.facts.minutes import RankMinute

_LONGEST_PATH = 4096
"""PATH_MAX of Linux."""

StatePath = Annotated[str, Meta(max_length=_LONGEST_PATH, pattern="^[^\\0]*$")]
"""Path of a file of learned timeouts, as a rank names it; "" for none."""


class Attached(Fact, frozen=True, kw_only=True):
    """A rank has connected: it is watched from now on.

    Args:
        at_ns: time of the connection.
        user_code_ns: start of its script, if known.
        has_group: its process group was set up before.
        watch_only: its script calls no hooks (so far): only its collectives are watched. That isn't logged.
        state_path: file of learned timeouts; "" for none.
        learns: the script asks for learned timeouts (calc_ft_timeouts).
    """

    rank: Rank
    cycle: Cycle
    pid: Pid
    at_ns: Moment | None = None
    user_code_ns: Moment | None = None
    has_group: bool = False
    watch_only: bool = False
    state_path: StatePath = ""
    learns: bool = False


class Detached(Fact, frozen=True, kw_only=True):
    """A rank has ended its monitoring; its process still runs."""

    rank: Rank
    cycle: Cycle
    pid: Pid | None = None
    at_ns: Moment | None = None


class Timeouts(Fact, frozen=True, kw_only=True):
    """The timeouts in force from now on; null for none.

    Args:
        initial_heartbeat, heartbeat: until the first heartbeat, and between two.
    """

    rank: Rank
    cycle: Cycle
    version: Count = 0
    initial_heartbeat: Seconds | None = None
    heartbeat: Seconds | None = None
    sections: Mapping[str, Seconds | None] = {}
    out_of_section: Seconds | None = None


class FirstIteration(Fact, frozen=True, kw_only=True):
    """A rank has begun its first iteration of the cycle."""

    rank: Rank
    cycle: Cycle
    iteration: Int
    at_ns: Moment


class FirstStep(Fact, frozen=True, kw_only=True):
    """A rank is through its first iteration of the cycle.

    Args:
        began_ns, at_ns: beginning and end of that iteration.
    """

    rank: Rank
    cycle: Cycle
    at_ns: Moment
    began_ns: Moment | None = None


class Minute(Fact, frozen=True, kw_only=True):
    """Intervals of the ranks of a node in about a minute, summed up.

    Args:
        at_ns: zero of all times in ``ranks``, which are seconds.
        ranks: a row for each rank, as described at the top.
    """

    cycle: Cycle
    at_ns: Moment
    ranks: tuple[RankMinute, ...]


class RankGone(Fact, frozen=True, kw_only=True):
    """A rank's process has ended; the rest is its progress board's last state.

    Args:
        iteration: iteration completed by then.
        open_sections: names, outermost first.
        last_transition_ns: time of its last section event.
    """

    rank: Rank
    cycle: Cycle
    pid: Pid | None = None
    iteration: Int | None = None
    open_sections: tuple[str, ...] = ()
    last_transition_ns: Moment | None = None


class Signalled(Fact, frozen=True, kw_only=True):
    """A hung rank was sent a signal."""

    rank: Rank
    cycle: Cycle
    signal: str
    pid: Pid | None = None
    at_ns: Moment | None = None


Record = Attached | Detached | Timeouts | FirstIteration | FirstStep | Minute | RankGone | Signalled
