"""Fault tolerance for Megatron-style training: hang detection, restarts, learned timeouts.

The names below are imported on first use: ``import megatron_ft`` itself costs nothing and imports no torch,
because every rank monitor runs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ft.config.files.yaml_file import FaultToleranceConfig
    from megatron_ft.errors import RankMonitorClientError
    from megatron_ft.learning.timeouts import HeartbeatTimeouts, SectionTimeouts
    from megatron_ft.link.base.control import WorkloadAction, WorkloadControlRequest
    from megatron_ft.rank.base.agreement import RankInfo
    from megatron_ft.rank.client.client import RankMonitorClient
    from megatron_ft.rank.client.server import RankMonitorServer
    from megatron_ft.run_ahead import fork_point

__version__ = "0.1.0"

__all__ = [
    "FaultToleranceConfig",
    "HeartbeatTimeouts",
    "RankInfo",
    "RankMonitorClient",
    "RankMonitorClientError",
    "RankMonitorServer",
    "SectionTimeouts",
    "WorkloadAction",
    "WorkloadControlRequest",
    "fork_point",
]

_HOME = {
    "FaultToleranceConfig": "megatron_ft.config.files.yaml_file",
    "HeartbeatTimeouts": "megatron_ft.learning.timeouts",
    "RankInfo": "megatron_ft.rank.base.agreement",
    "RankMonitorClient": "megatron_ft.rank.client.client",
    "RankMonitorClientError": "megatron_ft.errors",
    "RankMonitorServer": "megatron_ft.rank.client.server",
    "SectionTimeouts": "megatron_ft.learning.timeouts",
    "WorkloadAction": "megatron_ft.link.base.control",
    "WorkloadControlRequest": "megatron_ft.link.base.control",
    "fork_point": "megatron_ft.run_ahead",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # found without this function next time
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
