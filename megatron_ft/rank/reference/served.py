"""Modules of nvidia-resiliency-ext that this package serves in ranks, and where each of their names lives. Pure."""

from __future__ import annotations

import re

REFERENCE = "nvidia_resiliency_ext"
CLAIMED_VERSION = "0.7.0"
"""Version shown if the package isn't installed: the newest whose names are served."""

_FT, _PTL = f"{REFERENCE}.fault_tolerance", f"{REFERENCE}.ptl_resiliency"
_CHECKPOINTING = f"{REFERENCE}.checkpointing"
_LOCAL = f"{_CHECKPOINTING}.local"


def _all_in(home: str, *names: str) -> dict[str, str]:
    return {name: f"{home}:{name}" for name in names}


_CONFIG = _all_in("megatron_ft.config.files.yaml_file", "FaultToleranceConfig")
_CONTROL = _all_in("megatron_ft.link.base.control", "WorkloadAction", "WorkloadControlRequest")
_CLIENT = {
    **_all_in("megatron_ft.integrations.reference_client", "RankMonitorClient"),
    **_all_in("megatron_ft.errors", "RankMonitorClientError"),
}
_SERVER = _all_in("megatron_ft.rank.client.server", "RankMonitorServer")
_FAULTS = _all_in("megatron_ft.rank.faults.simulated", "SimulatedFaultParams")
_HEARTBEATS = _all_in("megatron_ft.integrations.lightning", "FaultToleranceCallback")
_SECTIONS = _all_in("megatron_ft.integrations.lightning", "FaultToleranceSectionsCallback")
_TENSOR_AWARE = "megatron_ft.integrations.tensor_aware"
_MANAGERS = "megatron_ft.integrations.local_checkpoints"
_REPLICATION = "megatron_ft.integrations.replication"
_SHARED = f"{REFERENCE}.shared_utils"

SERVED: dict[str, dict[str, str]] = {
    REFERENCE: {},
    _FT: {
        **_CONFIG,
        **_CONTROL,
        **_CLIENT,
        **_SERVER,
        **_all_in(
            f"{_FT}.rank_monitor_state_machine",
            *("InvalidStateTransitionException", "RankMonitorState", "RankMonitorStateMachine"),
        ),
    },
    f"{_FT}.config": _CONFIG,
    f"{_FT}.data": {
        "FT_LAUNCHER_IPC_SOCKET_ENV_VAR": "megatron_ft.rank.base.connection:LAUNCHER_SOCKET",
        "FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR": "megatron_ft.rank.base.connection:MONITOR_SOCKET",
        **_all_in("megatron_ft.learning.timeouts", "HeartbeatTimeouts", "SectionTimeouts"),
        **_all_in("megatron_ft.rank.base.agreement", "RankInfo"),
        **_CONTROL,
    },
    f"{_FT}.rank_monitor_client": _CLIENT,
    f"{_FT}.rank_monitor_server": _SERVER,
    _PTL: {
        **_FAULTS,
        **_HEARTBEATS,
        **_SECTIONS,
        "StragglerDetectionCallback": f"{_PTL}.straggler_det_callback:StragglerDetectionCallback",
    },
    f"{_PTL}._utils": _FAULTS,
    f"{_PTL}.fault_tolerance_callback": {**_FAULTS, **_HEARTBEATS},
    f"{_PTL}.fault_tolerance_sections_callback": {**_FAULTS, **_SECTIONS},
    _CHECKPOINTING: {},
    _LOCAL: {},
    f"{_LOCAL}.base_state_dict": _all_in(_TENSOR_AWARE, "TensorAwareStateDict"),
    f"{_LOCAL}.basic_state_dict": _all_in(_TENSOR_AWARE, "BasicTensorAwareStateDict"),
    f"{_LOCAL}.ckpt_managers": {},
    f"{_LOCAL}.ckpt_managers.base_manager": _all_in(_MANAGERS, "CheckpointingException", "CkptID"),
    f"{_LOCAL}.ckpt_managers.local_manager": _all_in(_MANAGERS, "LocalCheckpointManager"),
    f"{_LOCAL}.replication": {},
    f"{_LOCAL}.replication.group_utils": _all_in(_REPLICATION, "GroupWrapper", "parse_group_sequence"),
    f"{_LOCAL}.replication.strategies": _all_in(
        _REPLICATION, "CliqueReplicationStrategy", "LazyCliqueReplicationStrategy", "ReplicationStrategy"
    ),
    _SHARED: {},
    f"{_SHARED}.inject_fault": _all_in(
        "megatron_ft.integrations.reference_faults",
        *("Fault", "InjectedException", "clear_workload_exception", "dispatch_fault_injection"),
        "maybe_raise_workload_exception",
    ),
}
"""Served names by module, each as module:name. Other modules of these packages are the reference's own."""

PACKAGES = frozenset({_FT, _PTL, *(name for name, homes in SERVED.items() if not homes)})
"""Served modules that are packages."""


def needs_memory(module: str) -> bool:
    """Return True for a served module that is of no use without the extra megatron-ft[memory]."""
    return module == _CHECKPOINTING or module.startswith(f"{_CHECKPOINTING}.")


def version_shown(installed: str | None, ours: str) -> str:
    """Return ``nvidia_resiliency_ext.__version__``: comparable, and marked as ours.

    Based on the installed version if it is comparable, because the package's other modules are used.
    """
    base = installed if installed and re.match(r"\d+(\.\d+)*", installed) else CLAIMED_VERSION
    return f"{base}{'.' if '+' in base else '+'}megatron.ft.{ours}"


def why_absent(module: str, *, is_installed: bool) -> str:
    """Return the error text for the import of a module that is neither served nor installed."""
    has_not = "the one that is installed has none" if is_installed else "nvidia-resiliency-ext isn't installed here"
    return (
        f"No module named {module!r}: megatron_ft serves only nvidia_resiliency_ext.fault_tolerance, .ptl_resiliency, "
        f".shared_utils.inject_fault and (with megatron-ft[memory]) .checkpointing.local, and {has_not}"
    )
