"""The fault that ``FT_SIM_FAULT_DESC=type;rank;delay`` asks for."""

from __future__ import annotations

import os

from megatron_ft.core.errors import ConfigError, show
from megatron_ft.rank.hooks.loop_state import FaultToleranceSettings
from megatron_ft.rank.hooks.mistakes import no_restart_for_mistakes

__all__ = ["is_described", "take"]

_VARIABLE = "FT_SIM_FAULT_DESC"

_taken = ""


def is_described() -> bool:
    """Whether the variable asks for one."""
    return bool(os.environ.get(_VARIABLE, "").strip())


def take() -> FaultToleranceSettings | None:
    """What it asks for; None if it asks for nothing, or for what this process has taken before: it is started once.

    Raises:
        ConfigError: it can't be right; on all ranks alike. The launcher is asked not to restart.
    """
    global _taken
    description = os.environ.get(_VARIABLE, "")
    if not description.strip() or description == _taken:
        return None
    with no_restart_for_mistakes():
        settings = _settings(description)
    _taken = description
    return settings


def _settings(description: str) -> FaultToleranceSettings:
    try:
        fault_type, rank, delay = (part.strip() for part in description.split(";"))
        return FaultToleranceSettings(
            simulate_fault=True,
            simulated_fault_type=fault_type,
            simulated_fault_rank=int(rank) if rank else None,
            simulated_fault_base_delay=float(delay),
        )
    except ValueError:
        raise ConfigError(
            f"{_VARIABLE} must be type;rank;delay, like rank_killed;1;60 or rank_hung;;60, not {show(description)}"
        ) from None
