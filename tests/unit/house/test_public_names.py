"""The public names: all there, all lazy."""

from __future__ import annotations

import sys

import megatron_ft
from tests.unit.house.fresh_interpreter import output_of

NAMES = [
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


def test_public_name_resolves_in_a_fresh_process_and_imports_neither_torch_nor_numpy() -> None:
    assert sorted(megatron_ft.__all__) == NAMES
    assert set(NAMES) <= set(dir(megatron_ft))
    names = ", ".join(f"{name}.__name__" for name in NAMES)
    script = f"import sys\nfrom megatron_ft import *\nprint({names}, {{'torch', 'numpy'}} & set(sys.modules))"
    assert output_of(script).split() == [*NAMES, "set()"]


def test_actions_have_the_numbers_of_nvidia_resiliency_ext() -> None:
    actions = [megatron_ft.WorkloadAction(number).name for number in range(3)]
    assert actions == ["Continue", "ExcludeThisNode", "ShutdownWorkload"]


def test_the_package_itself_imports_nothing() -> None:
    loaded = output_of(
        "import sys; before = set(sys.modules); import megatron_ft; print(*sorted(set(sys.modules) - before))"
    ).split()
    assert {name for name in loaded if name.split(".")[0] not in sys.stdlib_module_names} == {"megatron_ft"}
