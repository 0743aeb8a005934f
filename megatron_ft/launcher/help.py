"""``--help`` of ft_launcher with what a new user needs first, and ``--help-all`` with all options in groups."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron_ft.config.torchrun import TORCHRUN_OPTIONS

_FIRST = (
    "nproc_per_node nnodes rdzv_endpoint max_restarts ft_cfg_path ft_rank_section_timeouts "
    "ft_rank_out_of_section_timeout ft_observe_only ft_log_dir ft_dry_run"
)
"""Options in ``--help``; ``--help-all`` has all."""
_GROUPS = {
    "the job": "nproc_per_node nnodes node_rank max_restarts standalone role module no_python run_path",
    "where the nodes meet": (
        "rdzv_endpoint rdzv_id rdzv_backend rdzv_conf master_addr master_port local_addr ft_scheduler"
    ),
    "configuration": "ft_cfg_path ft_ignore_missing_cfg ft_dry_run",
    "when a rank counts as hung": (
        "ft_rank_section_timeouts ft_rank_out_of_section_timeout ft_initial_rank_heartbeat_timeout "
        "ft_rank_heartbeat_timeout ft_startup_timeout ft_exit_timeout ft_learn ft_safety_factor "
        "ft_learned_floor ft_watch_collectives ft_observe_only ft_workload_check_interval"
    ),
    "what follows a failure": (
        "ft_restart_policy ft_max_no_progress_cycles ft_checkpoint_iteration_file ft_rank_termination_signal "
        "ft_workers_stop_timeout ft_scale_up_at_once"
    ),
    "stopping the job": "ft_term_timeout shutdown_timeout signals_to_handle ft_forward_signals",
    "nodes": (
        "ft_node_health_command ft_node_health_timeout ft_node_health_check_interval "
        "ft_enable_dist_storage_healthcheck ft_segment_health_check_dir ft_segment"
    ),
    "memory checkpoints": "ft_memory_checkpoint_dir ft_memory_checkpoint_write_timeout ft_memory_checkpoint_bandwidth",
    "how ranks are started": (
        "ft_preload ft_reference_names numa_binding start_method virtual_local_rank monitor_interval"
    ),
    "telemetry": "ft_metrics_port ft_metrics_textfile ft_on_event",
    "logs and output": (
        "ft_log_dir ft_log_level ft_per_cycle_applog_prefix log_dir logs_specs redirects tee "
        "local_ranks_filter duplicate_stdout_filters duplicate_stderr_filters event_log_handler"
    ),
}
"""Every option of this package and of torchrun, once."""


def group_help(parser: argparse.ArgumentParser) -> None:
    """Have ``--help`` show the options that a new user needs first, and ``--help-all`` all of them, in groups."""
    shown = {action.dest: action for action in parser._actions if action.help != argparse.SUPPRESS}
    for action in shown.values():  # torchrun's own have a second spelling, with underscores, and may mean more here
        action.option_strings = [word for word in action.option_strings if "_" not in word] or action.option_strings
        known = TORCHRUN_OPTIONS.get(action.dest)
        action.help = known.here if known is not None and known.here else action.help
    about = [shown.pop("help"), parser.add_argument("--help-all", action=_HelpAll, help="show all options and exit")]
    about += [shown.pop("version"), shown.pop("training_script"), shown.pop("training_script_args")]
    parser.usage = "%(prog)s [OPTIONS] SCRIPT [ARGUMENTS OF THE SCRIPT]"
    parser._action_groups = [
        _group(parser, "options to start with", [shown[dest] for dest in _FIRST.split()]),
        _group(parser, None, about),
    ]
    parser.epilog = "All other options: --help-all. A commented configuration: megatron-ft config-template megatron"
    grouped = {each: [shown.pop(dest) for dest in names.split() if dest in shown] for each, names in _GROUPS.items()}
    _HelpAll.groups = [_group(parser, each, actions) for each, actions in grouped.items()]
    _HelpAll.groups += [_group(parser, "more of torchrun", list(shown.values())), _group(parser, None, about)]


def _group(
    parser: argparse.ArgumentParser, title: str | None, actions: list[argparse.Action]
) -> argparse._ArgumentGroup:
    group = argparse._ArgumentGroup(parser, title)
    group._group_actions = actions
    return group


class _HelpAll(argparse.Action):
    """Prints the help of all options."""

    groups: list[argparse._ArgumentGroup]

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:  # noqa: A002
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser._action_groups = self.groups
        parser.epilog = "Durations are seconds, null means no limit. Options win over the YAML file."
        parser.print_help()
        parser.exit()
