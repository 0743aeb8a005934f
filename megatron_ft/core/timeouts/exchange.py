"""Messages by which timeouts are learned outside the ranks, the same between monitor, launcher and coordinator.

A monitor reports a `Milestone`; the coordinator answers the first report of each with a `Survey` to all launchers, and
these to their monitors; each monitor answers with its `Intervals`, each launcher with those of its node, merged. The
coordinator applies the rule and sends `Learned` to all launchers, which arm their monitors with `Arm`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from msgspec import field

from megatron_ft.core.codec import Count, Cycle, Fact, Finite, Int, Message, Seconds
from megatron_ft.core.timeouts.known import Known
from megatron_ft.core.timeouts.sketch import Sketches


class Moment(enum.Enum):
    """Point in time of a rank at which timeouts may be learned."""

    STEPS = "steps"
    """The rank has begun 10, 32, 64, 128, ... steps."""
    SAVE = "save"
    """A persistent save has ended."""
    END = "end"
    """The run is over: the rank is about to end its monitoring."""


class Milestone(Message, frozen=True):
    """A rank has got here in this cycle. ``count``: steps, or saves of this rank in this cycle; 0 for END."""

    cycle: Cycle
    moment: Moment
    count: Count = 0


class Survey(Message, frozen=True):
    """Report the intervals of this cycle so far. ``number`` counts the surveys of a coordinator."""

    cycle: Cycle
    number: Count
    moment: Moment = Moment.STEPS


class Facts(Message, frozen=True):
    """Facts about a run that decide what may be learned now; merged: true if it is true of any rank."""

    learns: bool = False
    """The script asks for learned timeouts (calc_ft_timeouts)."""
    has_hooks: bool = False
    """The hooks of a train loop are in use, which name the file of learned timeouts."""
    loaded: bool = False
    """A persistent checkpoint was loaded."""
    setup_open: bool = False
    """The section "setup" is open."""
    enough_steps: bool = False
    saved: bool = False
    async_saves: bool = False


def any_of(one: Facts, other: Facts) -> Facts:
    """Return what is true of any of their ranks."""
    if one == other:
        return one
    return Facts(*(getattr(one, name) or getattr(other, name) for name in Facts.__struct_fields__))


def enforces(facts: Facts, mode: str) -> bool:
    """Return True if ranks may be terminated by what is learned: the script or the user asks for it."""
    return facts.learns or mode in ("on", "reference")


class Intervals(Message, frozen=True):
    """Answer to the `Survey` of this number.

    Args:
        sketches: by section, and OUT_OF_SECTION. A section that exists (is configured, or was added by the hooks) and
            was never opened has an empty one.
        known: from the launcher at place 0 only: what the rule goes on from, as of the last `Learned` or the file.
        configured: from the launcher at place 0 only, as all that follows: sections that the user's configuration has.
        caps: the timeouts of those that have one, and of OUT_OF_SECTION.
        previous: learned timeouts so far.
        rule, factor, mode: "budget" or "reference"; the reference's ``safety_factor``; "off", "report", "on" or
            "reference".
    """

    cycle: Cycle
    number: Count
    sketches: Sketches = field(default_factory=dict)
    facts: Facts = Facts()
    known: Mapping[str, Known] | None = None
    configured: tuple[str, ...] = ()
    caps: Mapping[str, Seconds] = {}
    previous: Mapping[str, Seconds] = {}
    rule: str = "budget"
    factor: Finite = 5.0
    mode: str = "report"


class LearnedTimeout(Fact, frozen=True, kw_only=True):
    """A learned timeout of one section, and how it came about.

    Args:
        timeout_s: longest that an interval may last before its rank is suspected.
        first_s: the same for the first intervals of a cycle.
        limit_s: longest that an interval may last even while ranks make progress.
        previous_s: ``timeout_s`` before; None if there was none.
        max_observed_s, rank_of_max: the longest interval of this run, and the rank that had it.
        raised: factor by which kills have raised it, which is in all values above.
    """

    timeout_s: Seconds
    first_s: Seconds
    limit_s: Seconds
    previous_s: Seconds | None = None
    max_observed_s: Seconds | None = None
    rank_of_max: Int | None = None
    raised: Finite = 1.0


class Learned(Message, frozen=True):
    """Result of a `Survey`, for all launchers.

    Args:
        timeouts: by section, and OUT_OF_SECTION: those that were learned now.
        known: what the rule goes on from next time.
        enforces: ranks may be terminated by these; else hangs are only reported.
        writes: the launcher at place 0 writes them to the file.
        unopened: configured sections that no rank has opened, each with the section that was probably meant, or "".
        reasons: why other timeouts were not learned, in words.
    """

    cycle: Cycle
    number: Count
    moment: Moment
    timeouts: Mapping[str, LearnedTimeout] = {}
    known: Mapping[str, Known] = {}
    enforces: bool = False
    writes: bool = False
    unopened: Mapping[str, str] = {}
    reasons: tuple[str, ...] = ()


class Raised(Message, frozen=True):
    """A learned timeout of this name has ended a rank: it is doubled. From a launcher, and relayed to all."""

    cycle: Cycle
    name: str


class Armed(Message, frozen=True):
    """Timeout that a monitor applies to its rank. ``enforced`` False: a rank that exceeds it is only reported."""

    timeout_s: Seconds
    first_s: Seconds
    limit_s: Seconds
    enforced: bool = True


class Arm(Message, frozen=True):
    """Order to a monitor: apply these learned timeouts, by section and OUT_OF_SECTION.

    ``raised``: factors by which timeouts are multiplied that the rank's own client has calculated, by name (a section,
    OUT_OF_SECTION, "heartbeat", "initial_heartbeat").
    """

    cycle: Cycle
    timeouts: Mapping[str, Armed] = {}
    raised: Mapping[str, Finite] = {}
