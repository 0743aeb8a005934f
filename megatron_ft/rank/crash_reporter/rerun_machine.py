"""The state of Megatron's rerun state machine, where this process uses it. Nothing is imported or called for that."""

from __future__ import annotations

import sys
from typing import Any

from megatron_ft.link.base.rerun import EXIT_STATES, MODULE, RerunState

_OWN = {
    "WILL_RERUN_FROM_CHECKPOINT": "checkpoint_requested",
    "RERUNNING_AGAIN_FROM_CHECKPOINT": "restart_again_requested",
    "RERUNNING_IN_PLACE": "rerun_requested",
    "RERUNNING_FROM_CHECKPOINT": "suspicious_node",
}
"""Attribute of the machine that is set only on a rank whose result was rejected, by the state."""


def current_rerun_state() -> RerunState | None:
    """Return the state with which Megatron is about to exit; None if it trains, or this process doesn't use it."""
    try:
        machine: Any = getattr(sys.modules.get(MODULE), "_GLOBAL_RERUN_STATE_MACHINE", None)
        state = getattr(getattr(machine, "state", None), "name", None)
        if state not in EXIT_STATES or getattr(getattr(machine, "mode", None), "name", None) != "VALIDATE_RESULTS":
            return None
        node, device = getattr(machine, "suspicious_node", None), getattr(machine, "suspicious_device", None)
        return RerunState(
            state=state,
            own=bool(getattr(machine, _OWN[state], False)),
            node=node if isinstance(node, str) else "",
            device=device if type(device) is int and device >= 0 else None,
        )
    except Exception:  # noqa: BLE001 - whatever stands under that name: no rank may fail because of it
        return None
