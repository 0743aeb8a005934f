"""Messages by which timeouts are learned, the same between monitor, launcher and leader.

A monitor reports a `Milestone`; the leader answers the first report of each with a `Survey` to all launchers, and these
to their monitors; each monitor answers with its `Intervals`, each launcher with those of its node, merged. The leader
merges these and sends the result, of the same kind, to all launchers, which apply the rule and `Arm` their monitors.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

from msgspec import field

from megatron_ft.core.codec import Count, Cycle, Finite, Message, Rank, Seconds

MOST_NAMES = 72 + 1
"""In one message: all sections of a board, and OUT_OF_SECTION."""
_MOST_CHARACTERS = 64
"""Of a section's name."""


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
    """Report the intervals of this cycle so far. ``number`` counts the surveys of a leader."""

    cycle: Cycle
    number: Count
    moment: Moment = Moment.STEPS


class Observed(Message, frozen=True):
    """Intervals of one section in one cycle, of one rank or (merged) of several.

    Args:
        count: number of intervals that ended; of several ranks, that of the rank with the most.
        longest_s: the longest interval, also of those that are open now. ``rank`` has had it.
    """

    count: Count = 0
    longest_s: Seconds = 0.0
    rank: Rank = 0

    @property
    def is_opened(self) -> bool:
        """True if an interval has begun."""
        return self.count > 0 or self.longest_s > 0.0


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


class Intervals(Message, frozen=True):
    """Answer to the `Survey` of this number; from the leader, the answer of all nodes.

    ``seen``: by section, and OUT_OF_SECTION. A section that exists (is configured, or was added by the hooks) and was
    never opened has an empty one.
    """

    cycle: Cycle
    number: Count
    moment: Moment = Moment.STEPS
    seen: Mapping[str, Observed] = field(default_factory=dict)
    facts: Facts = Facts()


def merge(survey: Survey, answers: Iterable[Intervals]) -> Intervals:
    """Return the answer of all these: maxima, and facts that are true of any. Merging twice changes nothing."""
    seen: dict[str, Observed] = {}
    facts = Facts()
    for each in answers:
        if each.facts != facts:
            facts = Facts(*(getattr(facts, name) or getattr(each.facts, name) for name in Facts.__struct_fields__))
        for name, one in each.seen.items():
            other = seen.get(name)
            if len(name) > _MOST_CHARACTERS or (other is None and len(seen) >= MOST_NAMES):
                continue  # a launcher of another version, or a bad one: the result goes to all
            if other is None:
                seen[name] = one
            elif one.count > other.count or (one.longest_s, -one.rank) > (other.longest_s, -other.rank):
                longest = max(other, one, key=lambda found: (found.longest_s, -found.rank))
                seen[name] = Observed(max(one.count, other.count), longest.longest_s, longest.rank)
    return Intervals(survey.cycle, survey.number, survey.moment, seen, facts)


class Killed(Message, frozen=True):
    """A learned timeout of this name has ended a rank. From a launcher, and relayed to all.

    ``moved``: a rank of the job was seen to make progress before, in the same interval.
    """

    cycle: Cycle
    name: str
    moved: bool = False


class Armed(Message, frozen=True):
    """Timeout that a monitor applies to its rank. ``enforced`` False: a rank that exceeds it is only reported."""

    timeout_s: Seconds
    enforced: bool = True


class Arm(Message, frozen=True):
    """Order to a monitor: apply these learned timeouts, by section and OUT_OF_SECTION.

    ``raised``: factors by which timeouts are multiplied that the rank's own client has calculated, by name (a section,
    OUT_OF_SECTION, "heartbeat", "initial_heartbeat").
    """

    cycle: Cycle
    timeouts: Mapping[str, Armed] = field(default_factory=dict)
    raised: Mapping[str, Finite] = field(default_factory=dict)
