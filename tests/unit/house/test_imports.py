"""What the files of users' processes, and of commands, load when they are imported and used."""

from __future__ import annotations

import pytest

from tests.unit.house.fresh_interpreter import output_of

COLLECTIVES = """
from megatron_ft.rank.crash_reporter.flight_recorder import collectives
assert collectives().error == "torch.distributed isn't imported"
"""


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        pytest.param("import megatron_ft.fault_tolerance", {"torch", "numpy"}, id="hooks"),
        pytest.param("from megatron_ft.link.linux import nvml; nvml.load()", {"torch"}, id="driver_of_the_gpus"),
        pytest.param(COLLECTIVES, {"torch"}, id="collectives_of_a_process_without_torch"),
    ],
)
def test_code_of_ranks_imports_nothing_heavy(code: str, heavy: set[str]) -> None:
    assert output_of(f"{code}\nimport sys; print({heavy!r} & set(sys.modules))").strip() == "set()"
