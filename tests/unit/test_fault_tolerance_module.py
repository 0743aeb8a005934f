"""The functional module: the rules of its hooks, one by one, with a client that only records."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ft import fault_tolerance as ft
from megatron_ft.errors import NotUnderLauncherError
from megatron_ft.rank.base import agreement
from megatron_ft.rank.hooks import hook_order
from tests.support.training import (
    FakeClient,
    all_hooks,
    bench,
    clean_environment,
    client,
    evaluate,
    learning_run,
    new_state,
    save_checkpoint,
    start,
    train,
)

__all__ = ["bench", "clean_environment", "client"]  # fixtures


def test_private_constants_have_the_values_of_megatron_bridge() -> None:
    assert ft._NUM_WARMUP_ITERS == 1
    assert ft._MIN_ITERS_FOR_STEP_TIMEOUT_UPDATE == 16


def test_setup_connects_and_opens_setup(tmp_path: Path, client: FakeClient) -> None:
    state = start(tmp_path, calc_ft_timeouts=True, async_save=True)
    assert client.is_initialized
    assert state.rank_monitor_client is client
    assert client.open == ["setup"]
    ft_state = state.fault_tolerance_state
    assert ft_state.is_setup_section_open is True
    assert ft_state.is_async_chkpt_enabled is True
    assert ft_state.is_calculating_timeouts is True
    assert ft_state.ft_state_path == str(tmp_path / "ckpt" / "ft_state.json")


@pytest.mark.parametrize("save", [None, ""])
def test_setup_without_save_directory_raises(save: str | None, client: FakeClient) -> None:
    state = ft.GlobalState.create(save=save, ft=ft.FaultToleranceSettings())
    with pytest.raises(ValueError, match="checkpointing save dir must be set") as error:
        ft.setup(state.cfg, state)
    assert "\n" not in str(error.value)
    assert state.rank_monitor_client is None


def test_hooks_without_launcher_warn_once_and_do_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    state = new_state(tmp_path)
    ft.setup(state.cfg, state)
    assert state.rank_monitor_client is None
    assert list(tmp_path.iterdir()) == []
    all_hooks(state)
    assert capfd.readouterr().err.splitlines() == [
        "FT: WARNING: not started with ft_launcher: fault tolerance is off (FT_REQUIRE_LAUNCHER=1 makes this an error)"
    ]


def test_setup_without_a_required_launcher_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_REQUIRE_LAUNCHER", "1")
    state = new_state(tmp_path)
    with pytest.raises(NotUnderLauncherError, match="ft_launcher"):
        ft.setup(state.cfg, state)
    assert state.rank_monitor_client is None


def test_second_setup_closes_the_first_client_and_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeClient] = []
    monkeypatch.setattr("megatron_ft.fault_tolerance.RankMonitorClient", lambda: made.append(FakeClient()) or made[-1])
    state = start(tmp_path)
    ft.on_checkpoint_loaded(False, state)
    train(state, 20)
    save_checkpoint(state)
    ft.setup(state.cfg, state)
    first, second = made
    assert first.calls[-1] == ("shutdown",)
    assert not first.is_initialized
    assert state.rank_monitor_client is second
    counters = state.fault_tolerance_state
    assert (counters.seen_tr_iters_cnt, counters.seen_checkpoints_cnt, counters.curr_eval_iter_idx) == (0, 0, 0)
    assert counters.is_persistent_chkpt_loaded is False


def test_hooks_before_setup_do_nothing(tmp_path: Path) -> None:
    state = new_state(tmp_path)
    all_hooks(state)
    counters = state.fault_tolerance_state
    assert (counters.seen_tr_iters_cnt, counters.curr_eval_iter_idx, counters.seen_checkpoints_cnt) == (0, 0, 0)
    ft.shutdown(state)
    ft.abort(state)
    assert state.rank_monitor_client is None


def test_first_training_step_closes_setup_and_is_out_of_section(tmp_path: Path, client: FakeClient) -> None:
    state = start(tmp_path)
    ft.on_training_step_start(state)
    assert client.open == []
    assert state.fault_tolerance_state.is_setup_section_open is False
    ft.on_training_step_end(state)
    ft.on_training_step_start(state)
    assert client.open == ["step"]
    ft.on_training_step_end(state)
    assert client.open == []
    assert client.sections() == [("start", "setup"), ("end", "setup"), ("start", "step"), ("end", "step")]


def test_evaluation_before_training_closes_setup_and_has_its_own_warm_up(tmp_path: Path, client: FakeClient) -> None:
    state = start(tmp_path)
    evaluate(state, 3)
    assert client.sections() == [
        ("start", "setup"),
        ("end", "setup"),
        *[("start", "step"), ("end", "step")] * 2,
    ]


def test_evaluation_has_a_warm_up_of_its_own_each_time(tmp_path: Path, client: FakeClient) -> None:
    state = start(tmp_path)
    train(state, 3)
    for _ in range(2):
        before = client.sections().count(("start", "step"))
        evaluate(state, 4)
        assert client.sections().count(("start", "step")) - before == 3
        train(state, 1)
    assert state.fault_tolerance_state.curr_eval_iter_idx == 0


def warnings(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return re.findall(r"^FT: WARNING: (.*?)(?:\(| was| are)", capfd.readouterr().err, re.MULTILINE)


def test_hooks_before_setup_warn_once_unless_fault_tolerance_is_off(
    tmp_path: Path, client: FakeClient, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    state = new_state(tmp_path)
    all_hooks(state)
    assert warnings(capfd) == [], "without a launcher nobody expects anything"
    monkeypatch.setenv("FT_RANK_MONITOR_IPC_SOCKET", "/nowhere.sock")
    off = ft.GlobalState.create(save=str(tmp_path), ft=None)
    ft.setup(off.cfg, off)
    all_hooks(off)
    assert off.rank_monitor_client is None
    assert warnings(capfd) == []
    monkeypatch.setattr(hook_order, "order", hook_order.HookOrder())
    all_hooks(state)
    all_hooks(state)
    assert warnings(capfd) == ["hooks"]


@pytest.mark.parametrize(
    ("hook", "times", "name"),
    [
        (lambda state: ft.setup(state.cfg, state), 2, "setup"),
        (ft.on_training_step_start, 3, "on_training_step_start"),
        (ft.shutdown, 3, "shutdown"),
        (ft.abort, 3, None),
    ],
)
def test_hook_that_is_called_twice_warns_once(
    tmp_path: Path,
    client: FakeClient,
    capfd: pytest.CaptureFixture[str],
    hook: Callable[[ft.GlobalState], None],
    times: int,
    name: str | None,
) -> None:
    state = start(tmp_path)
    client.open.clear()
    for _ in range(times - (name == "setup")):
        hook(state)
    ft.shutdown(state) if name is None else None
    assert warnings(capfd) == ([] if name is None else [name])


def test_setup_before_the_process_group_warns_in_the_first_step(
    tmp_path: Path, client: FakeClient, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for had_group, warned in ((True, []), (False, ["setup"])):
        monkeypatch.setattr(agreement, "has_process_group", lambda has=had_group: has)
        state = start(tmp_path)
        monkeypatch.setattr(agreement, "has_process_group", lambda: True)
        train(state, 2)
        ft.shutdown(state)
        assert warnings(capfd) == warned


def test_a_save_is_in_checkpointing_and_counts(tmp_path: Path, client: FakeClient) -> None:
    state = start(tmp_path)
    train(state, 1)
    save_checkpoint(state)
    assert client.sections()[-2:] == [("start", "checkpointing"), ("end", "checkpointing")]
    assert state.fault_tolerance_state.seen_checkpoints_cnt == 1


def test_an_async_finalisation_is_in_checkpointing_but_is_no_save(tmp_path: Path, client: FakeClient) -> None:
    state = start(tmp_path, calc_ft_timeouts=True)
    train(state, 20)
    save_checkpoint(state, is_async_finalization=True)
    assert client.sections()[-2:] == [("start", "checkpointing"), ("end", "checkpointing")]
    assert state.fault_tolerance_state.seen_checkpoints_cnt == 0
    assert client.calculations() == []


def test_shutdown_disconnects_and_hooks_are_no_ops_again(
    tmp_path: Path, client: FakeClient, capfd: pytest.CaptureFixture[str]
) -> None:
    state = start(tmp_path)
    train(state, 2)
    ft.on_training_step_start(state)
    ft.on_checkpointing_start(state)
    ft.shutdown(state)
    assert client.open == []
    assert capfd.readouterr().err == ""
    assert client.calls[-1] == ("shutdown",)
    assert state.rank_monitor_client is None
    before = list(client.calls)
    all_hooks(state)
    ft.shutdown(state)
    assert client.calls == before


def test_shutdown_disconnects_even_if_the_update_fails(tmp_path: Path, client: FakeClient) -> None:
    state = learning_run(tmp_path, client)
    client.calculation_error = RuntimeError("a peer is gone")
    with pytest.raises(RuntimeError, match="a peer is gone"):
        ft.shutdown(state)
    assert not client.is_initialized
    assert state.rank_monitor_client is None


@pytest.mark.parametrize("failure", [ZeroDivisionError, StopIteration])
def test_shutdown_while_an_exception_is_handled_runs_a_collective_at_the_end_of_the_data_only(
    tmp_path: Path, client: FakeClient, capfd: pytest.CaptureFixture[str], failure: type[Exception]
) -> None:
    state, is_end = learning_run(tmp_path, client, saves=0), failure is StopIteration
    try:
        raise failure
    except failure:
        ft.shutdown(state)
    assert len(client.calculations()) == is_end
    told = "timeouts were not updated: ZeroDivisionError is being handled" in capfd.readouterr().err
    assert told is not is_end
    assert not client.is_initialized
    assert state.rank_monitor_client is None


def test_abort_disconnects_without_a_collective(tmp_path: Path, client: FakeClient) -> None:
    state = learning_run(tmp_path, client, saves=0)
    ft.on_training_step_start(state)
    ft.abort(state)
    assert client.calculations() == []
    assert client.calls[-1] == ("shutdown",)
    all_hooks(state)
    ft.abort(state)
