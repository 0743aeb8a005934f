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
