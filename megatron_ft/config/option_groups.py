"""Groups of the options of ``ft_launcher`` for its help, and those that a new user needs first.

Names are attributes of parsed arguments.
"""

from __future__ import annotations

FIRST = (
    "nproc_per_node nnodes rdzv_endpoint max_restarts ft_cfg_path ft_rank_section_timeouts "
    "ft_rank_out_of_section_timeout ft_observe_only ft_log_dir ft_dry_run"
)
"""Options in ``--help``; ``--help-all`` has all."""
GROUPS = {
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
