"""What the hooks tell the monitor of a run, word by word on a real board, and what they never do."""

from __future__ import annotations

import builtins
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_ft import fault_tolerance as ft
from megatron_ft.link.base import layout
from tests.support.training import Bench, bench, clean_environment, save_checkpoint, train

__all__ = ["bench", "clean_environment"]  # fixtures

USUAL = layout.FACT_HOOKS


def facts(bench: Bench) -> int:
    return bench.boards[-1].words[layout.W_LEARNING_FACTS]


def word(bench: Bench, number: int) -> int:
    return bench.boards[-1].words[number]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, USUAL),
        ({"calc_ft_timeouts": True}, USUAL | layout.FACT_LEARNS),
        ({"calc_ft_timeouts": True, "async_save": True}, USUAL | layout.FACT_LEARNS | layout.FACT_ASYNC_SAVES),
    ],
)
def test_setup_tells_what_the_configuration_asks_for(bench: Bench, settings: dict[str, Any], told: int) -> None:
    bench.start(**settings)
    assert facts(bench) == told
    path = str(bench.tmp_path / "ckpt" / "ft_state.json")
    assert bench.hellos == [{"state_path": path, "learns": settings.get("calc_ft_timeouts", False)}]


def test_setup_names_an_absolute_path_where_the_save_directory_is_relative(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bench.tmp_path)
    state = ft.GlobalState.create(save="here", ft=ft.FaultToleranceSettings())
    ft.setup(state.cfg, state)
    assert bench.hellos[0]["state_path"] == str(bench.tmp_path / "here" / "ft_state.json")
    assert state.fault_tolerance_state.ft_state_path == os.path.join("here", "ft_state.json")


def test_sections_without_a_configured_timeout_are_added_to_the_board(bench: Bench) -> None:
    bench.config.rank_section_timeouts = {"step": 9.0}
    bench.start()
    timeouts = {section.name: section.timeout_ns for section in bench.seen().sections}
    assert timeouts == {"step": 9_000_000_000, "setup": None, "checkpointing": None}


def test_configured_section_that_the_hooks_never_open_is_named(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.config.rank_section_timeouts = {"stpe": 9.0, "io": None, "warmup": 5.0, "setup": 60.0}
    bench.start()
    warnings = [line for line in capsys.readouterr().err.splitlines() if "has a timeout" in line]
    assert [line.partition("section ")[2] for line in warnings] == [
        "'stpe' has a timeout, and the hooks never open it: they open setup, step, checkpointing"
    ]


def test_steps_count_and_are_enough_after_sixteen(bench: Bench) -> None:
    state = bench.start()
    train(state, 15)
    assert (word(bench, layout.W_STEPS), facts(bench)) == (15, USUAL)
    train(state, 1)
    assert (word(bench, layout.W_STEPS), facts(bench)) == (16, USUAL | layout.FACT_ENOUGH_STEPS)


def test_saves_are_counted_without_async_finalisations(bench: Bench) -> None:
    state = bench.start()
    save_checkpoint(state)
    save_checkpoint(state, is_async_finalization=True)
    assert word(bench, layout.W_SAVES) == 1


def test_load_of_a_persistent_checkpoint_is_told_also_if_it_comes_before_setup(bench: Bench, tmp_path: Path) -> None:
    state = ft.GlobalState.create(save=str(tmp_path), ft=ft.FaultToleranceSettings())
    for is_local, told in ((True, USUAL), (False, USUAL | layout.FACT_LOADED)):
        ft.on_checkpoint_loaded(is_local_chkpt=is_local, global_state=state)
        ft.setup(state.cfg, state)
        assert facts(bench) == told
        ft.shutdown(state)


def test_iteration_number_that_goes_down_is_counted(bench: Bench) -> None:
    state = bench.start()
    for step in (5, 6, 0, 1, 1, 0):
        state.train_state.step = step  # type: ignore[union-attr]
        ft.on_training_step_start(state)
        ft.on_training_step_end(state)
    assert word(bench, layout.W_ITERATIONS_BACK) == 2


def test_shutdown_with_learning_waits_until_the_launcher_has_written(bench: Bench) -> None:
    state = bench.start(calc_ft_timeouts=True)
    board = bench.boards[-1]

    def write() -> None:
        while not facts(bench) & layout.FACT_RUN_ENDS:
            pass
        assert not bench.seen().closing
        board.words[layout.W_STATE_WRITTEN] = layout.STATE_WRITTEN

    launcher = threading.Thread(target=write)
    launcher.start()
    ft.shutdown(state)
    launcher.join()
    assert bench.seen().closing


@pytest.mark.parametrize(
    ("word", "text"),
    [
        (0, "it isn't confirmed that the learned timeouts of this run are written"),
        (layout.STATE_NOT_WRITTEN, "no timeouts of this run are written to a file"),
    ],
)
def test_shutdown_that_is_not_confirmed_ends_within_its_bound_and_says_so(
    bench: Bench, word: int, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    state = bench.start(calc_ft_timeouts=True)
    bench.boards[-1].words[layout.W_STATE_WRITTEN] = word
    began = time.monotonic()
    ft.shutdown(state)
    assert time.monotonic() - began < 4.0
    assert text in capfd.readouterr().err


def test_hooks_after_setup_touch_no_file(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **_named: Any) -> Any:
        raise AssertionError(f"a file was touched: {arguments}")

    state = ft.GlobalState.create(save=str(bench.tmp_path / "ckpt"), ft=ft.FaultToleranceSettings())
    names = ("open", "mkdir", "makedirs", "stat", "lstat", "access", "listdir", "scandir", "rename", "unlink")
    ft.setup(state.cfg, state)
    with monkeypatch.context() as patched:
        patched.setattr(builtins, "open", refuse)
        for name in names:
            patched.setattr(os, name, refuse)
        ft.on_checkpoint_loaded(False, state)
        train(state, 40)
        save_checkpoint(state)
        ft.shutdown(state)
