"""Options of earlier versions, and their replacements."""

from __future__ import annotations

REMOVED: dict[str, str] = {
    "timeout_rule": "use learn: reference (--ft-learn reference) for the rule of nvidia-resiliency-ext",
    "learn_timeouts": "use learn: report, on or off (--ft-learn)",
    "false_kill_budget": "it is fixed: one interval in a million",
    "calculated_timeout_floor": "it is fixed: no learned timeout is below 5 s",
}
"""Replacement by the option's name as a key of YAML."""


def removed(name: object) -> str:
    """Return the message for a removed option, by a key of YAML or a word of the command line; else ""."""
    if not isinstance(name, str):
        return ""
    key = name.removeprefix("--").replace("-", "_").removeprefix("ft_").removeprefix("param_")
    return f"there is no option {key} any more: {REMOVED[key]}" if key in REMOVED else ""
