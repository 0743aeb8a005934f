"""Options and commands of earlier versions, and what to use instead."""

from __future__ import annotations

REMOVED: dict[str, str] = {
    "node_health": "use --ft-node-health-command 'megatron-ft node-health gpu,disk,net,storage'",
    "log_max_bytes": "it is fixed: 200 MB for the event logs of one process",
    "preload_timeout": "imports have no time limit; to share none use --ft-preload none",
    "stopped_exit_code": "result.json says `stopped`; the code is 0 or 1 by the ranks, 130 for SIGINT, 143 in a pod",
    "say": "it is fixed: lines about the job are printed once, in pods of Kubernetes by each launcher",
    "max_failed_starts": "it is fixed: 2; --ft-max-no-progress-cycles 0 switches both off",
    "watch_collectives_timeout": "use --ft-watch-collectives report:SECONDS or end:SECONDS",
    "timeout_rule": "use learn: report, on or off (--ft-learn); there is one rule",
    "learn_timeouts": "use learn: report, on or off (--ft-learn)",
    "false_kill_budget": "there is none: --ft-learned-floor and --ft-safety-factor make learned timeouts longer",
    "calculated_timeout_floor": "use learned_floor (--ft-learned-floor)",
    "chain": "give every job the same --ft-log-dir, and sbatch --dependency=afternotok:JOBID (docs/slurm.md)",
}
"""Replacement by the option's name as a key of YAML."""

REMOVED_COMMANDS: dict[str, str] = {
    "check-launch": "add --ft-dry-run to the flags of your ft_launcher line",
    "check-config": "ft_launcher --ft-dry-run --ft-cfg-path FILE SCRIPT shows each value and its source",
    "completion": "megatron-ft --help and ft_launcher --help list what there is",
    "coordinator": "the launcher on the host of --rdzv-endpoint starts the coordinator",
    "exporter": "ft_launcher serves metrics, with --ft-metrics-port; megatron-ft report tells goodput",
    "report --png": "megatron-ft report --html FILE draws the same timeline, to zoom into",
    "report --trace": "megatron-ft report --html FILE draws the same timeline, to zoom into",
    "replay": "use megatron-ft report LOG_DIR --suggest-timeouts for timeouts from observed intervals",
}
"""Commands of megatron-ft of earlier versions, and their options, and what to use instead."""


def removed(name: object) -> str:
    """Return the message for a removed option, by a key of YAML or a word of the command line; else ""."""
    if not isinstance(name, str):
        return ""
    key = name.removeprefix("--").replace("-", "_").removeprefix("ft_").removeprefix("param_")
    return f"there is no option {key} any more: {REMOVED[key]}" if key in REMOVED else ""
