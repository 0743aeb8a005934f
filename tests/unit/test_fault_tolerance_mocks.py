"""The functional module with objects that are only mocks, as the tests of the frameworks use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from megatron_ft import fault_tolerance as ft
from tests.support.training import (
    bench,
    clean_environment,
    client,
)

__all__ = ["bench", "clean_environment", "client"]  # fixtures


def mock_state(**counters: Any) -> Any:
    state = MagicMock()
    for name, value in counters.items():
        setattr(state.fault_tolerance_state, name, value)
    return state


def test_mock_training_steps_call_sections_after_the_warm_up() -> None:
    state = mock_state(is_setup_section_open=True, seen_tr_iters_cnt=0, curr_eval_iter_idx=5)
    ft.on_training_step_start(state)
    state.rank_monitor_client.end_section.assert_called_once_with("setup")
    state.rank_monitor_client.start_section.assert_not_called()
    state.rank_monitor_client.set_iteration.assert_not_called()
    assert state.fault_tolerance_state.curr_eval_iter_idx == 0
    ft.on_training_step_end(state)
    assert state.fault_tolerance_state.seen_tr_iters_cnt == 1

    state = mock_state(is_setup_section_open=False, seen_tr_iters_cnt=5)
    state.train_state.step = 7
    ft.on_training_step_start(state)
    assert state.rank_monitor_client.mock_calls == [call.set_iteration(7), call.start_section("step")]
    ft.on_training_step_end(state)
    state.rank_monitor_client.end_section.assert_called_once_with("step")
    assert state.fault_tolerance_state.seen_tr_iters_cnt == 6


def test_mock_evaluation_steps_call_sections_after_the_warm_up() -> None:
    state = mock_state(is_setup_section_open=True, curr_eval_iter_idx=0)
    for _ in range(3):
        ft.on_eval_step_start(state)
        ft.on_eval_step_end(state)
    assert state.rank_monitor_client.start_section.call_args_list == [call("step")] * 2
    assert state.rank_monitor_client.end_section.call_count == 3
    assert state.fault_tolerance_state.curr_eval_iter_idx == 3


def test_mock_checkpointing_updates_timeouts_unless_it_is_an_async_finalisation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    update = MagicMock()
    monkeypatch.setattr(ft, "_maybe_update_timeouts", update)
    state = mock_state(seen_checkpoints_cnt=0)
    ft.on_checkpointing_start(state)
    state.rank_monitor_client.start_section.assert_called_once_with("checkpointing")
    ft.on_checkpointing_end(is_async_finalization=True, global_state=state)
    update.assert_not_called()
    ft.on_checkpointing_end(is_async_finalization=False, global_state=state)
    update.assert_called_once_with(state)
    assert state.fault_tolerance_state.seen_checkpoints_cnt == 1


def test_mock_update_selects_sections_by_its_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    update = MagicMock()
    monkeypatch.setattr(ft, "_update_timeouts", update)
    # is_setup_section_open stays a mock: only a real True means open
    state = mock_state(
        is_calculating_timeouts=True,
        is_persistent_chkpt_loaded=True,
        seen_tr_iters_cnt=20,
        seen_checkpoints_cnt=3,
        is_async_chkpt_enabled=False,
    )
    ft._maybe_update_timeouts(state)
    update.assert_called_once_with(
        selected_sections=["setup", "step", "checkpointing"], calc_out_of_section=False, global_state=state
    )
    ft._maybe_update_timeouts(state, is_closing_ft=True)
    assert update.call_args == call(
        selected_sections=["setup", "step", "checkpointing"], calc_out_of_section=True, global_state=state
    )


def test_mock_update_writes_the_state_that_the_next_run_loads(tmp_path: Path) -> None:
    state = mock_state(ft_state_path=str(tmp_path / "ft_state.json"))
    state.rank_monitor_client.state_dict.return_value = {"timeouts": "data"}
    ft._update_timeouts(selected_sections=["setup", "step"], calc_out_of_section=True, global_state=state)
    state.rank_monitor_client.calculate_and_set_section_timeouts.assert_called_once_with(
        selected_sections=["setup", "step"], calc_out_of_section=True
    )
    restarted = mock_state(ft_state_path=str(tmp_path / "ft_state.json"))
    ft._load_state_if_exists(restarted)
    restarted.rank_monitor_client.load_state_dict.assert_called_once_with({"timeouts": "data"})


def test_mock_load_without_a_file_loads_nothing(tmp_path: Path) -> None:
    state = mock_state(ft_state_path=str(tmp_path / "ft_state.json"))
    ft._load_state_if_exists(state)
    state.rank_monitor_client.load_state_dict.assert_not_called()


def test_mock_setup_loads_the_state_and_shutdown_updates_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = MagicMock()
    monkeypatch.setattr("megatron_ft.fault_tolerance.RankMonitorClient", MagicMock(return_value=made))
    load = MagicMock()
    monkeypatch.setattr(ft, "_load_state_if_exists", load)
    config, state = MagicMock(), MagicMock()
    config.checkpoint.save = str(tmp_path / "ckpt")
    existing = state.rank_monitor_client
    ft.setup(config, state)
    existing.shutdown_workload_monitoring.assert_called_once()
    made.init_workload_monitoring.assert_called_once_with()
    load.assert_called_once_with(state)
    made.start_section.assert_called_once_with("setup")
    assert state.rank_monitor_client is made
    update = MagicMock()
    monkeypatch.setattr(ft, "_maybe_update_timeouts", update)
    ft.shutdown(state)
    update.assert_called_once_with(state, is_closing_ft=True)
    made.shutdown_workload_monitoring.assert_called_once()
    assert state.rank_monitor_client is None
