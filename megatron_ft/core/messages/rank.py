"""What a rank and its monitor say to each other when the rank connects; later the progress board says everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ft.core.codec import Count, Cycle, Moment, Rank, Vocabulary

__all__ = ["FROM_RANK", "TO_RANK", "FromRank", "Hello", "Refused", "ToRank", "Welcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a rank says of itself.

    Args:
        user_code_ns: when its script began; 0 if that isn't known.
        has_group: it has set its process group up.
        again: it has said so before, and got no answer.
        watch_only: its script calls no hooks (so far): only its collectives are watched, by the launcher.
    """

    cycle: Cycle
    rank: Rank
    warmup_iterations: Count
    user_code_ns: Moment = 0
    has_group: bool = False
    again: bool = False
    watch_only: bool = False


FromRank = Hello
FROM_RANK: Vocabulary[FromRank] = Vocabulary(FromRank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The rank is watched; with this come the descriptors that it needs. ``config`` is a `FaultToleranceConfig`'s."""

    config: Mapping[str, Any]
    log_dir: str | None = None
    run_id: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """The rank isn't watched."""

    reason: str


ToRank = Welcome | Refused
TO_RANK: Vocabulary[ToRank] = Vocabulary(ToRank)
