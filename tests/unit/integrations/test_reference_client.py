"""The client that scripts get which import the reference's: what they rely on beyond ours."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from megatron_ft.config.files.yaml_file import FaultToleranceConfig
from megatron_ft.errors import RankMonitorClientError
from megatron_ft.integrations import reference_client as reference
from megatron_ft.integrations.reference_client import RankMonitorClient
from megatron_ft.learning.timeouts import SectionTimeouts
from megatron_ft.rank.client import client as ours
from megatron_ft.rank.faults import simulated


@pytest.fixture
def inits(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The numbers of warm-up iterations that clients have connected with."""
    found: list[int | None] = []
    monkeypatch.setattr(ours.RankMonitorClient, "init_workload_monitoring", lambda _self, number: found.append(number))
    monkeypatch.setattr(simulated, "_taken", "")
    monkeypatch.delenv("FT_SIM_FAULT_DESC", raising=False)
    return found


def test_the_warm_up_is_five_iterations_unless_the_script_says_another_number(inits: list[int | None]) -> None:
    for number in (None, 0, 3):
        RankMonitorClient().init_workload_monitoring(number)
    assert inits == [5, 0, 3]


def test_iterations_are_found_in_megatron_lms_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    client, recorder = RankMonitorClient(), MagicMock()
    client._recorder = recorder
    client.start_section("setup")
    recorder.iteration.assert_not_called()
    args = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", SimpleNamespace(_GLOBAL_ARGS=args))
    client.start_section("a")
    args.curr_iteration = 7
    client.start_section("step")
    recorder.iteration.assert_called_once_with(7)
    assert [call.args for call in recorder.start.call_args_list] == [("setup",), ("a",), ("step",)]
    client._recorder = None


def test_the_variable_of_simulated_faults_is_followed_where_megatron_lm_does_not(
    inits: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = MagicMock()
    monkeypatch.setattr(reference.simulated, "start", started)
    RankMonitorClient().init_workload_monitoring()
    monkeypatch.setenv("FT_SIM_FAULT_DESC", "rank_killed;1;5")
    RankMonitorClient().init_workload_monitoring()
    started.assert_not_called()  # Megatron-LM isn't there

    def older() -> None:
        maybe_setup_simulated_fault()  # type: ignore[name-defined]  # noqa: F821 - only looked at

    def newer() -> None:
        pass

    for pretrain, expected in ((older, 0), (newer, 1)):
        monkeypatch.setitem(sys.modules, "megatron.training.training", SimpleNamespace(pretrain=pretrain))
        RankMonitorClient().init_workload_monitoring()
        assert started.call_count == expected
    assert started.call_args.args[0].rank_to_fail == 1


def test_section_that_is_open_is_left_out_of_a_calculation_only_where_it_was_selected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As nvidia-resiliency-ext's own test_timeouts_sections.py expects: without a selection, all must be closed."""
    client, recorder = RankMonitorClient(), MagicMock()
    client.section_timeouts = SectionTimeouts({"setup": 10.0, "step": 10.0}, 10.0)
    recorder.observed.return_value = {"setup": -1, "step": 2 * 10**9, "out_of_section": 10**9}
    recorder.open_ages.return_value = {"setup": 5 * 10**9}
    monkeypatch.setattr(client, "_ready", lambda: recorder)
    monkeypatch.setattr(client, "_write_timeouts", lambda: None)
    client.cfg = FaultToleranceConfig()
    with pytest.raises(RankMonitorClientError, match="setup"):
        client.calculate_and_set_section_timeouts()
    assert client.calculate_and_set_section_timeouts(["setup", "step"])
    assert client.section_timeouts.section == {"setup": 10.0, "step": 10.0}
