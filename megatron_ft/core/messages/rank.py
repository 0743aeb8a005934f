"""Messages between a rank and its monitor: on connecting, and about a hang, with the rank's crash reporter.

Everything else that a monitor knows of its rank is on the progress board.
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
    """A rank connects, and identifies itself.

    Args:
        user_code_ns: start of its script; 0 if unknown.
        has_group: its process group is set up.
        again: repeated, because no answer came.
        watch_only: its script calls no hooks (so far): only its collectives are watched, by the launcher.
        state_path: file of learned timeouts; "" for none.
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
    """The rank is watched; its descriptors are attached. ``config`` is a `FaultToleranceConfig`'s."""

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
    """Ask for the collectives and the main thread's place. ``samples``: number of samples of the place."""

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
    """Answer to the question of this ``id``.

    Args:
        stack: calls of the main thread, innermost first.
        places: distinct places of the main thread: calls, each with its instruction.
        own_rank: the rank's number in its default process group; None without one.
    """

    id: int
    collectives: Collectives | NoCollectives
    stack: tuple[Frame, ...] = ()
    places: tuple[tuple[str, ...], ...] = ()
    own_rank: int | None = None

    def packed(self) -> dict[str, Any]:
        """Return the answer for JSON, as one object."""
        return {**fields(_Head(self.id, self.stack, self.places, self.own_rank)), **fields(self.collectives)}

    @staticmethod
    def parse(message: Any) -> Answer:
        """Reverse ``packed``.

        Raises:
            ProtocolError: the message is malformed.
        """
        head = unpack(_Head, message)
        collectives = unpack(NoCollectives, message) if "error" in message else unpack(Collectives, message)
        return Answer(id=head.id, collectives=collectives, stack=head.stack, places=head.places, own_rank=head.own_rank)
