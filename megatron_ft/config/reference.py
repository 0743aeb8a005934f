"""Options of nvidia-resiliency-ext, 0.2 to 0.7, that this package ignores, and the consequences.

Supported options are among the names of this package's options; all spellings of both are in
`tests/unit/config/test_reference_options.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_ft.link.base.escalation import GRACE_S

_IGNORED = {
    "network links are not checked; use --ft-node-health-command 'megatron-ft node-health net', and "
    "--ft-node-health-check-interval": (
        "enable_nic_monitor enable_nic_healthcheck pci_topo_file link_down_path_template link_state_path_template"
    ),
    "storage is not checked; use --ft-node-health-command 'megatron-ft node-health storage:/PATH'": (
        "storage_healthcheck_path storage_health_check_path"
    ),
    "ranks wait until the driver has taken device memory back, within fixed bounds": (
        "gpu_memory_reclaim_timeout gpu_memory_tolerance_mb gpu_memory_poll_interval"
    ),
    "there is no log server: each node writes the ranks' output itself (--log-dir, --tee)": (
        "enable_log_server log_server_port log_server_log log_server_log_prefix log_server_graceful_shutdown_timeout "
        "log_aggregator_count log_leaf_max_queue_chunks"
    ),
    "no service reads the logs; ft_launcher itself reports which rank failed first, and why": (
        "attribution_endpoint attribution_stop_action attribution_export_url attribution_analysis_backend "
        "attribution_compute_timeout attribution_llm_api_key_file attribution_llm_base_url attribution_llm_model "
        "attribution_log_level attribution_startup_timeout attrsvc_host attrsvc_port"
    ),
    "no node health service is asked; use --ft-node-health-command with a client of it": "node_health_check_endpoint",
    "no JSON file for each cycle; use --ft-log-dir and megatron-ft report LOG_DIR --json": (
        "cycle_info_dir cycle_info_job_id"
    ),
    "the exit code of a job that makes no progress is always 93": "no_restart_exit_code",
    "nodes are ordered by --node-rank, else as the scheduler numbers them": "use_infra_group_rank",
    "nothing is lost: the launcher detects the end of a rank at once": "restart_check_interval",
    "nothing is lost: no hook waits for an answer": "skip_section_response",
    "nothing is lost: a rank's whole process group is ended and waited for": "check_remaining_processes",
    "nothing is lost: a rank's uncaught exception is always reported": "install_exception_hook",
    "nothing is lost: progress is read from memory shared with the ranks": "progress_update_interval",
    "nothing is lost: there is one way for nodes to meet, with spare nodes": "rdzv_impl",
    "the launcher writes to standard error, and its event logs to --ft-log-dir": "nvrx_logfile",
    "one iteration more counts as progress; use --ft-max-no-progress-cycles": "min_progress_iterations",
    "ranks are bound by --numa-binding node, and take memory near their CPUs": "numa_bind_strict",
    "set it in the script: ft.num_warmup_iters, or Megatron-LM's --ft-num-warmup-iters": "num_warmup_iterations",
}
"""Consequence of ignoring, and the options' names as keys of YAML."""
IGNORED: dict[str, str] = {name: why for why, names in _IGNORED.items() for name in names.split()}
"""Consequence of ignoring, by the option's name as a key of YAML."""

QUIET: dict[str, tuple[str, ...]] = {
    "no_restart_exit_code": ("93",),
    "use_infra_group_rank": ("true", "yes", "1"),
}
"""Values of ignored options that ask for what is done anyway: no line is printed for them."""


def is_said(name: str, value: object) -> bool:
    """Return True if a line is printed for this value of an ignored option."""
    return value is not None and str(value).strip().lower() not in QUIET.get(name, ())


SERVED: dict[str, str] = {
    **dict.fromkeys(
        (
            *("cfg_path", "ignore_missing_cfg", "rank_section_timeouts", "restart_policy", "term_timeout"),
            *("workers_stop_timeout", "max_no_progress_cycles", "checkpoint_iteration_file"),
            *("segment", "per_cycle_applog_prefix"),
        ),
        "",
    ),
    "enable_dist_storage_healthcheck": "also GPFS, BeeGFS, Ceph and Weka; a node whose check fails is on standby",
    "node_health_check_interval": "of the health checks asked for; a failure is reported, and ends nothing",
    "segment_health_check_dir": "all nodes of a marked segment are on standby; none ends its Slurm task",
    "initial_rank_heartbeat_timeout": "3600 s unless given; 0.5 and later have no default",
    "rank_heartbeat_timeout": "2700 s unless given; 0.5 and later have no default",
    "rank_out_of_section_timeout": "also before the first 'step', unless the script imports nvidia-resiliency-ext",
    "safety_factor": "the same formula; a learned timeout terminates at --ft-learned-floor (60 s) at the earliest",
    "workload_check_interval": "a hang is detected when its timeout expires, not at the next check",
    "rank_termination_signal": f"a rank still running {GRACE_S:g} s later gets SIGKILL",
    "log_level": "user lines are printed at INFO and below",
}
"""Options of nvidia-resiliency-ext that work here: what differs, "" for nothing."""


def describe(ignored: Iterable[tuple[str, str]]) -> list[str]:
    """Return one line per reason for ignored options, each given as its name and the words it was given with."""
    by_reason: dict[str, list[str]] = {}
    for name, words in ignored:
        by_reason.setdefault(IGNORED[name], []).append(words)
    return [f"ignored: {', '.join(dict.fromkeys(words))} ({reason})" for reason, words in by_reason.items()]
