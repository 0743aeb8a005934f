"""Names that only nvidia-resiliency-ext knows.

They are ignored with one warning, so that files and command lines of its users work here.
"""

from __future__ import annotations

REFERENCE_FIELDS: tuple[str, ...] = (
    # Fields of the configuration of nvidia-resiliency-ext, up to 0.4 ...
    "node_health_check_interval",
    "restart_check_interval",
    "enable_nic_monitor",
    "pci_topo_file",
    "link_down_path_template",
    # ... and later ones ...
    "enable_nic_healthcheck",
    "enable_dist_storage_healthcheck",
    "storage_healthcheck_path",
    "link_state_path_template",
    "skip_section_response",
    "segment",
    "numa_bind_strict",
    "gpu_memory_reclaim_timeout",
    "gpu_memory_tolerance_mb",
    "gpu_memory_poll_interval",
    "check_remaining_processes",
    "max_no_progress_restarts",
    "max_no_progress_cycles",
    "min_progress_iterations",
    "progress_update_interval",
    "checkpoint_iteration_file",
    "install_exception_hook",
    "num_warmup_iterations",
    "attribution_endpoint",
    "attribution_stop_action",
    "attribution_export_url",
    "attrsvc_host",
    "attrsvc_port",
    "cycle_info_dir",
    "segment_health_check_dir",
    # ... and a key that published YAML files carry although its launcher reads it from the command line only.
    "restart_policy",
)
"""Keys of its YAML files; its launcher has most of them as options too."""

REFERENCE_OPTIONS: tuple[str, ...] = (
    "attribution_analysis_backend",
    "attribution_compute_timeout",
    "attribution_llm_api_key_file",
    "attribution_llm_base_url",
    "attribution_llm_model",
    "attribution_log_level",
    "attribution_startup_timeout",
    "enable_log_server",
    "log_aggregator_count",
    "log_leaf_max_queue_chunks",
    "log_server_graceful_shutdown_timeout",
    "log_server_log_prefix",
    "log_server_port",
    "node_health_check_endpoint",
    "no_restart_exit_code",
    "nvrx_logfile",
    "per_cycle_applog_prefix",
    "rdzv_impl",
    "storage_health_check_path",
)
"""Options of its launcher beside those, as names of fields. All take one value."""
