"""Messages by which timeouts are learned, the same between monitor, launcher and leader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import field
from msgspec.structs import replace

from megatron_ft.link.base.codec import Count, Cycle, Message, PartMessage, Rank, Seconds
from megatron_ft.link.base.layout import MAX_SECTIONS

MOST_NAMES, _MOST_CHARACTERS = MAX_SECTIONS + 1, 64
"""In one message: all sections of a board, and OUT_OF_SECTION; of a section's name."""
FACT_SAVED, FACT_SETUP_OPEN = 1 << 8, 1 << 9
"""There was a save; the section "setup" is open. The other facts are those of the board."""


class Observed(Message, frozen=True):
    """Intervals of one section in one cycle, of one rank or (merged) of several.

    Args:
        count: number of intervals that ended; of several ranks, that of the rank with the most.
        longest_s: the longest interval, also of those that are open now. ``rank`` has had it.
    """

    count: Count = 0
    longest_s: Seconds = 0.0
    rank: Rank = 0


class Intervals(PartMessage, frozen=True):
    """Intervals of a cycle so far: of a rank, of a node, or of the job.

    Args:
        reached: milestones: the number of persistent saves, and the last of 32, 64, 128, ... steps.
        ended: the run is over; merged: of all.
        facts: FACT_ bits that are true; merged: of any.
        seen: by section, and OUT_OF_SECTION.
    """

    cycle: Cycle
    reached: tuple[Count, Count] = (0, 0)
    ended: bool = False
    facts: Count = 0
    seen: Mapping[str, Observed] = field(default_factory=dict)


def merge(cycle: int, all_of: Iterable[Intervals]) -> Intervals:
    """Return the maxima. Merging twice changes nothing."""
    found, seen = Intervals(cycle, ended=True), dict[str, Observed]()
    for each in all_of:
        reached = max(found.reached, each.reached)
        found = Intervals(cycle, reached, found.ended and each.ended, found.facts | each.facts, seen)
        for name, one in each.seen.items():
            if len(name) > _MOST_CHARACTERS or (name not in seen and len(seen) >= MOST_NAMES):
                continue  # a launcher of another version, or a bad one: the result goes to all
            other = seen.get(name, one)
            longest = max(other, one, key=lambda it: (it.longest_s, -it.rank))
            seen[name] = replace(longest, count=max(one.count, other.count))
    return found


class Killed(PartMessage, frozen=True):
    """A learned timeout of this name has ended a rank. From a launcher, and relayed to all.

    ``timeout_s`` was exceeded. ``moved``: a rank of the job was seen to make progress before, in the same interval.
    """

    cycle: Cycle
    name: str
    timeout_s: Seconds
    moved: bool = False


class Arm(Message, frozen=True):
    """Order to a monitor: apply these learned timeouts, in seconds by section and OUT_OF_SECTION.

    Timeouts that the rank's own client has calculated are only replaced by longer ones: a kill has doubled them. These
    may be those of heartbeats, too ("heartbeat", "initial_heartbeat"). ``enforced`` False: a rank that exceeds one is
    only reported.
    """

    cycle: Cycle
    timeouts: Mapping[str, Seconds] = field(default_factory=dict)
    enforced: bool = True
