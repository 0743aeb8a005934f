"""Modules of nvidia-resiliency-ext that this package serves in ranks, and where each of their names lives. Pure."""

from __future__ import annotations

import re

__all__ = ["CLAIMED_VERSION", "PACKAGES", "REFERENCE", "SERVED", "version_shown", "why_absent"]

REFERENCE = "nvidia_resiliency_ext"
CLAIMED_VERSION = "0.7.0"
"""Version shown if the package isn't installed: the newest whose names are served."""

_FT, _PTL = f"{REFERENCE}.fault_tolerance", f"{REFERENCE}.ptl_resiliency"


def _all_in(home: str, *names: str) -> dict[str, str]:
    return {name: f"{home}:{name}" for name in names}


_CONFIG = _all_in("megatron_ft.ipc.config.yaml_file", "FaultToleranceConfig")
_CONTROL = _all_in("megatron_ft.core.control", "WorkloadAction", "WorkloadControlRequest")
_CLIENT = {
    **_all_in("megatron_ft.integrations.reference_client", "RankMonitorClient"),
    **_all_in("megatron_ft.core.errors", "RankMonitorClientError"),
}
_SERVER = _all_in("megatron_ft.rank.client.server", "RankMonitorServer")
_COMPATIBILITY = "megatron_ft.rank.reference.compatibility"
_FAULTS = _all_in("megatron_ft.integrations.lightning_faults", "SimulatedFaultParams")
_HEARTBEATS = _all_in("megatron_ft.integrations.lightning_heartbeats", "FaultToleranceCallback")
_SECTIONS = _all_in("megatron_ft.integrations.lightning_sections", "FaultToleranceSectionsCallback")

SERVED: dict[str, dict[str, str]] = {
    _FT: {**_CONFIG, **_CONTROL, **_CLIENT, **_SERVER},
    f"{_FT}.config": _CONFIG,
    f"{_FT}.data": {
        "FT_LAUNCHER_IPC_SOCKET_ENV_VAR": "megatron_ft.rank.base.connection:LAUNCHER_SOCKET",
        "FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR": "megatron_ft.rank.base.connection:MONITOR_SOCKET",
        **_all_in("megatron_ft.core.timeouts.in_force", "HeartbeatTimeouts", "SectionTimeouts"),
        **_all_in("megatron_ft.rank.base.agreement", "RankInfo"),
        **_CONTROL,
    },
    f"{_FT}.rank_monitor_client": _CLIENT,
    f"{_FT}.rank_monitor_server": _SERVER,
    f"{_FT}.utils": _all_in(_COMPATIBILITY, "is_process_alive", "wait_for_mp_events"),
    _PTL: {
        **_FAULTS,
        **_HEARTBEATS,
        **_SECTIONS,
        "StragglerDetectionCallback": f"{_PTL}.straggler_det_callback:StragglerDetectionCallback",
    },
    f"{_PTL}._utils": {
        **_FAULTS,
        "is_module_available": f"{_COMPATIBILITY}:is_module_available",
    },
    f"{_PTL}.fault_tolerance_callback": {**_FAULTS, **_HEARTBEATS},
    f"{_PTL}.fault_tolerance_sections_callback": {**_FAULTS, **_SECTIONS},
}
"""Served names by module, each as module:name. Other modules of these packages are the reference's own."""

PACKAGES = frozenset({_FT, _PTL})
"""Served modules that are packages."""


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
        f"No module named {module!r}: megatron_ft serves only nvidia_resiliency_ext.fault_tolerance and "
        f".ptl_resiliency, and {has_not}"
    )
