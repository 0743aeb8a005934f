"""Every option of nvidia-resiliency-ext's launchers, 0.2 to 0.7: which work, and which are ignored with a line."""

from __future__ import annotations

import argparse

import pytest

from megatron_ft.config.config import OPTIONS
from megatron_ft.config.files.options import add_ft_options, read_ft_options
from megatron_ft.config.reference import SERVED
from tests.support.torchrun_parser import torchrun_parser

WORKS = """
    --fault-tol-cfg-path --ft-cfg-path --ft-cfg_path --ft-checkpoint-iteration-file --ft-checkpoint_iteration_file
    --ft-ignore-missing-cfg --ft-initial-rank-heartbeat-timeout
    --ft-initial_rank_heartbeat_timeout --ft-log-level --ft-log_level --ft-max-no-progress-cycles
    --ft-max-no-progress-restarts --ft-max_no_progress_cycles --ft-max_no_progress_restarts
    --ft-param-initial_rank_heartbeat_timeout --ft-param-log_level --ft-param-rank_heartbeat_timeout
    --ft-param-rank_out_of_section_timeout --ft-param-rank_section_timeouts --ft-param-rank_termination_signal
    --ft-param-safety_factor --ft-param-workload_check_interval --ft-rank-heartbeat-timeout
    --ft-rank-out-of-section-timeout --ft-rank-section-timeouts --ft-rank-termination-signal
    --ft-rank_heartbeat_timeout --ft-rank_out_of_section_timeout --ft-rank_section_timeouts
    --ft-rank_termination_signal --ft-restart-policy --ft-restart_policy --ft-safety-factor --ft-safety_factor
    --ft-workload-check-interval --ft-workload_check_interval
    --ignore-missing-fault-tol-cfg
    --ft-per-cycle-applog-prefix
    --ft_per_cycle_applog_prefix --ft-segment --ft_segment
    --ft-enable-dist-storage-healthcheck --ft_enable_dist_storage_healthcheck
    --ft-node-health-check-interval --ft-node_health_check_interval --ft-param-node_health_check_interval
    --ft-segment-health-check-dir
    --restart-policy --restart_policy --term-timeout --term_timeout --workers-stop-timeout --workers_stop_timeout
"""
IGNORED_WITH_A_LINE = """
    --ft-numa-bind-strict --ft-numa_bind_strict
    --ft-attribution-analysis-backend --ft-attribution-compute-timeout --ft-attribution-endpoint
    --ft-attribution-export-url --ft-attribution-llm-api-key-file --ft-attribution-llm-base-url
    --ft-attribution-llm-model --ft-attribution-log-level --ft-attribution-startup-timeout
    --ft-attribution-stop-action --ft-attrsvc-host --ft-attrsvc-port --ft-check-remaining-processes
    --ft-check_remaining_processes --ft-enable-log-server
    --ft-enable-nic-healthcheck --ft-enable-nic-monitor --ft-enable_nic_healthcheck --ft-enable_nic_monitor
    --ft-gpu-memory-poll-interval --ft-gpu-memory-reclaim-timeout --ft-gpu-memory-tolerance-mb
    --ft-gpu_memory_poll_interval --ft-gpu_memory_reclaim_timeout --ft-gpu_memory_tolerance_mb
    --ft-install-exception-hook --ft-install_exception_hook --ft-link-down-path-template
    --ft-link-state-path-template --ft-link_down_path_template --ft-link_state_path_template
    --ft-log-aggregator-count --ft-log-leaf-max-queue-chunks --ft-log-server-graceful-shutdown-timeout
    --ft-log-server-log --ft-log-server-log-prefix --ft-log-server-port --ft-min-progress-iterations
    --ft-min_progress_iterations
    --ft-node-health-check-endpoint --ft-node_health_check_endpoint
    --ft-nvrx-logfile
    --ft-param-enable-nic-monitor --ft-param-link-down-path-template
    --ft-no-restart-exit-code --ft_no_restart_exit_code --ft-use-infra-group-rank --ft-use_infra_group_rank
    --ft-cycle-info-dir --ft-cycle-info-job-id --ft_cycle_info_dir --ft_cycle_info_job_id
    --ft-param-pci-topo-file --ft-param-restart_check_interval --ft-pci-topo-file --ft-pci_topo_file
    --ft-rdzv-impl --ft-rdzv_impl --ft-restart-check-interval
    --ft-restart_check_interval --ft-skip-section-response --ft-skip_section_response
    --ft-storage-health-check-path --ft_attribution_analysis_backend --ft_attribution_compute_timeout
    --ft_attribution_endpoint --ft_attribution_export_url --ft_attribution_llm_api_key_file
    --ft_attribution_llm_base_url --ft_attribution_llm_model --ft_attribution_log_level
    --ft_attribution_startup_timeout --ft_attribution_stop_action --ft_attrsvc_host --ft_attrsvc_port
    --ft_enable_log_server --ft_log_aggregator_count
    --ft_log_leaf_max_queue_chunks --ft_log_server_graceful_shutdown_timeout --ft_log_server_log
    --ft_log_server_log_prefix --ft_log_server_port --ft_nvrx_logfile --ft_param_enable_nic_monitor
    --ft_param_link_down_path_template --ft_param_pci_topo_file
    --ft_storage_health_check_path
"""
TORCHRUNS = """
    --local-addr --local-ranks-filter --local_addr --local_ranks_filter --log-dir --log_dir --logs-specs
    --logs_specs --master-addr --master-port --master_addr --master_port --max-restarts --max_restarts --module
    --monitor-interval --monitor_interval --nnodes --no-python --no_python --node-rank --node_rank
    --nproc-per-node --nproc_per_node --rdzv-backend --rdzv-conf --rdzv-endpoint --rdzv-id --rdzv_backend
    --rdzv_conf --rdzv_endpoint --rdzv_id --redirects --role --run-path --run_path --standalone --start-method
    --start_method --tee -m -r -t
"""
FLAGS = ("--ignore-missing-fault-tol-cfg", "--ft-ignore-missing-cfg")
VALUES = {"rank_section_timeouts": "step:7", "rank_termination_signal": "SIGTERM", "log_level": "INFO"}
VALUES |= {"restart_policy": "min-healthy", "enable_dist_storage_healthcheck": "true"}


def parser() -> argparse.ArgumentParser:
    result = torchrun_parser()
    add_ft_options(result)
    return result


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in OPTIONS.values():
        for name in each.variables:
            monkeypatch.delenv(name, raising=False)


def test_list_of_reference_options_is_complete() -> None:
    assert len({*WORKS.split(), *IGNORED_WITH_A_LINE.split(), *TORCHRUNS.split()}) == 185


@pytest.mark.parametrize("word", sorted(set(WORKS.split()) - set(FLAGS)))
def test_reference_option_with_a_counterpart_sets_it(word: str) -> None:
    (option,) = [each for each in OPTIONS.values() if word in each.spellings]
    assert option.field in SERVED, "--ft-dry-run says what differs"
    value = VALUES.get(option.field, "7")
    namespace = parser().parse_args([word, value])
    assert getattr(namespace, option.dest) == value
    if option.field != "cfg_path":
        options = read_ft_options(namespace)
        assert options.warnings == []
        assert getattr(options, option.field) == option.kind.check(option.kind.read(value))


@pytest.mark.parametrize("word", IGNORED_WITH_A_LINE.split())
def test_reference_option_without_a_counterpart_is_ignored_with_a_line(word: str) -> None:
    (line,) = read_ft_options(parser().parse_args([word, "0"])).warnings
    shown = word.replace("_", "-").replace("-param-", "-")
    assert line.startswith(f"ignored: {shown} (")
    assert len(line) > len(f"ignored: {shown} (") + 20
