"""Messages between a rank and its monitor: on connecting, and about a hang, with the rank's crash reporter.

Everything else that a monitor knows of its rank is on the progress board.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_ft.diagnosis.collectives import Collectives
from megatron_ft.diagnosis.stacks import Frame
from megatron_ft.link.base.codec import Count, Cycle, Int, Message, Moment, Rank, Vocabulary
from megatron_ft.link.facts.monitor import StatePath

# -- when the rank connects -------------------------------------------------------------------------------------


class RankHello(Message, frozen=True, kw_only=True):
    """A rank connects, and identifies itself, with what its monitor reports as `Attached`.

    Args:
        again: repeated, because no answer came.
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


class ShowRank(Message, frozen=True):
    """``megatron-ft stacks`` asks what the rank does now. The answer is a `RankShown`, or a `RankRefused`."""


FromRank = RankHello | ShowRank
FROM_RANK: Vocabulary[FromRank] = Vocabulary(FromRank)


class RankWelcome(Message, frozen=True, kw_only=True):
    """The rank is watched; its descriptors are attached. ``config`` is a `FaultToleranceConfig`'s."""

    config: Mapping[str, Any]
    log_dir: str | None = None
    run_id: str = ""


class RankRefused(Message, frozen=True):
    """The rank isn't watched."""

    reason: str


class RankShown(Message, frozen=True):
    """Evidence on the rank, as text."""

    text: str


ToRank = RankWelcome | RankRefused
TO_RANK: Vocabulary[ToRank] = Vocabulary(ToRank)
SHOWN: Vocabulary[RankShown | RankRefused] = Vocabulary(RankShown | RankRefused)


# -- with the crash reporter of the rank -----------------------------------------------------------------------


class Question(Message, frozen=True):
    """Ask for the collectives and the main thread's place. ``samples``: number of samples of the place."""

    id: Count
    samples: Count = 0


class Answer(Message, frozen=True, kw_only=True):
    """Answer to the question of this ``id``.

    Args:
        stack: calls of the main thread, innermost first.
        places: distinct places of the main thread: calls, each with its instruction.
        own_rank: the rank's number in its default process group; None without one.
        handling: exception that the main thread is handling, and where it was raised.
    """

    id: Int
    collectives: Collectives
    stack: tuple[Frame, ...] = ()
    places: tuple[tuple[str, ...], ...] = ()
    own_rank: Int | None = None
    handling: str = ""
