"""What a rank and its monitor say to each other: when the rank connects, and about a hang, to its crash reporter.

All else that a monitor knows of its rank it reads from the progress board.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_ft.core.codec import Count, Cycle, Moment, Rank, Vocabulary, fields, unpack
from megatron_ft.core.diagnosis.collectives import Collectives, NoCollectives
from megatron_ft.core.diagnosis.stacks import Frame
from megatron_ft.core.facts.monitor import StatePath

# -- when the rank connects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHello:
    """A rank connects, and says who it is.

    Args:
        user_code_ns: when its script began; 0 if that isn't known.
        has_group: it has set its process group up.
        again: it has said so before, and got no answer.
        watch_only: its script calls no hooks (so far): only its collectives are watched, by the launcher.
        state_path: file of learned timeouts; "": there is none.
        learns: the script asks for learned timeouts (calc_ft_timeouts).
    """

    cycle: Cycle
    rank: Rank
    warmup_iterations: Count
    user_code_ns: Moment = 0
    has_group: bool = False
    again: bool = False
    watch_only: bool = False
    state_path: StatePath = ""
    learns: bool = False
    NAME: ClassVar[str] = "hello"


FromRank = RankHello
FROM_RANK: Vocabulary[FromRank] = Vocabulary(FromRank)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWelcome:
    """The rank is watched; with this come the descriptors that it needs. ``config`` is a `FaultToleranceConfig`'s."""

    config: Mapping[str, Any]
    log_dir: str | None = None
    run_id: str = ""
    NAME: ClassVar[str] = "welcome"


@dataclass(frozen=True, slots=True)
class RankRefused:
    """The rank isn't watched."""

    reason: str
    NAME: ClassVar[str] = "refused"


ToRank = RankWelcome | RankRefused
TO_RANK: Vocabulary[ToRank] = Vocabulary(ToRank)


# -- with the crash reporter of the rank -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Question:
    """What are your collectives, and where is your main thread? ``samples``: how often to look where it is, too."""

    id: Count
    samples: Count = 0


@dataclass(frozen=True, slots=True)
class _Head:
    id: Count
    stack: tuple[Frame, ...] = ()
    places: tuple[tuple[str, ...], ...] = ()
    own_rank: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to the question of this ``id``.

    Args:
        stack: the calls of the main thread, the innermost first.
        places: where the main thread was seen, each place once: such calls, each with the instruction it was at.
        own_rank: the rank's number in its default process group; None if it has none.
    """

    id: int
    collectives: Collectives | NoCollectives
    stack: tuple[Frame, ...] = ()
    places: tuple[tuple[str, ...], ...] = ()
    own_rank: int | None = None

    def packed(self) -> dict[str, Any]:
        """For JSON: all in one object."""
        return {**fields(_Head(self.id, self.stack, self.places, self.own_rank)), **fields(self.collectives)}

    @staticmethod
    def parse(message: Any) -> Answer:
        """The reverse of ``packed``.

        Raises:
            ProtocolError: it is none.
        """
        head = unpack(_Head, message)
        collectives = unpack(NoCollectives, message) if "error" in message else unpack(Collectives, message)
        return Answer(id=head.id, collectives=collectives, stack=head.stack, places=head.places, own_rank=head.own_rank)
