"""A job without configured timeouts: the hooks learn them by themselves, after some minutes at first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_ft.core.timeouts.learned import CONFIGURED_FIELDS
from megatron_ft.rank.hooks.learning import ours

__all__ = ["begin", "is_time_to_learn"]

_NOTHING_IS_CONFIGURED = (
    "no timeout is configured: they are learned from this run, and until then no rank is terminated as hung "
    "(with learn_timeouts: off none is learned)"
)
_FIRST = 32


def begin(client: Any, ft_state: Any, added: Sequence[str]) -> str:
    """Decide whether to learn unasked, once the state file was loaded; what is to be said of timeouts that don't exist.

    ``added``: the sections without a configured timeout.
    """
    mine = ours(client)
    ft_state.learns_by_itself = False
    if mine is not None and mine.cfg is not None and not ft_state.is_calculating_timeouts:
        is_unconfigured = not any(mine.cfg.is_set(name) for name in CONFIGURED_FIELDS)
        ft_state.learns_by_itself = ft_state.is_calculating_timeouts = (
            is_unconfigured and mine.cfg.learn_timeouts == "auto"
        )
    if ft_state.learns_by_itself:
        known = mine is not None and mine.section_timeouts is not None and mine.section_timeouts.calculated_sections
        return "" if known else _NOTHING_IS_CONFIGURED
    names = ", ".join(map(repr, added))
    return f"no timeout is configured for {names}: infinite until one is learned" if added else ""


def is_time_to_learn(ft_state: Any) -> bool:
    """After 32, 64, 128, ... steps of a run, the same on all ranks: a job may save once in an hour."""
    steps = ft_state.seen_tr_iters_cnt
    return getattr(ft_state, "learns_by_itself", False) and steps >= _FIRST and steps & (steps - 1) == 0
