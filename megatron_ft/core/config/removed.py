"""Options and commands of earlier versions, and what to use instead."""

from __future__ import annotations

REMOVED: dict[str, str] = {
    "node_health": "use --ft-node-health-command 'megatron-ft node-health gpu,disk,net,storage'",
    "timeout_rule": "use learn: reference (--ft-learn reference) for the rule of nvidia-resiliency-ext",
    "learn_timeouts": "use learn: report, on or off (--ft-learn)",
    "false_kill_budget": "it is fixed: one interval in a million",
    "calculated_timeout_floor": "it is fixed: no learned timeout is below 5 s",
}
"""Replacement by the option's name as a key of YAML."""

REMOVED_COMMANDS: dict[str, str] = {"check-launch": "add --ft-dry-run to the flags of your ft_launcher line"}
"""Commands of megatron-ft of earlier versions, and what to use instead."""


def removed(name: object) -> str:
    """Return the message for a removed option, by a key of YAML or a word of the command line; else ""."""
    if not isinstance(name, str):
        return ""
    key = name.removeprefix("--").replace("-", "_").removeprefix("ft_").removeprefix("param_")
    return f"there is no option {key} any more: {REMOVED[key]}" if key in REMOVED else ""
