"""Who says that the training is finished, and when: so that no further job is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ft import fault_tolerance as ft
from megatron_ft.integrations import megatron_lm
from tests.support.megatron_lm_loop import arguments, fresh_state, train
from tests.support.training import FakeClient, bench, clean_environment, client

__all__ = ["bench", "clean_environment", "client", "fresh_state"]  # fixtures


@pytest.fixture
def flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "flags" / "finished"
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(path))
    return path


def end(tmp_path: Path, *, step: int, train_iters: int | None) -> None:
    state = ft.GlobalState.create(save=str(tmp_path / "ckpt"), ft=ft.FaultToleranceSettings(), train_iters=train_iters)
    ft.setup(state.cfg, state)
    assert state.train_state is not None
    state.train_state.step = step
    ft.shutdown(state)


@pytest.mark.parametrize(
    ("step", "train_iters", "is_finished"), [(100, 100, True), (101, 100, True), (99, 100, False), (100, None, False)]
)
def test_functional_module_writes_the_flag_once_train_iters_are_reached(
    step: int, train_iters: int | None, is_finished: bool, tmp_path: Path, flag: Path, client: FakeClient
) -> None:
    end(tmp_path, step=step, train_iters=train_iters)
    assert flag.exists() is is_finished
    if is_finished:
        assert flag.read_text() == "the training is finished: train_iters=100 is reached\n"


def test_flag_is_not_written_after_a_failure(tmp_path: Path, flag: Path, client: FakeClient) -> None:
    with pytest.raises(RuntimeError, match="lost"):
        try:
            raise RuntimeError("lost")
        finally:
            end(tmp_path, step=100, train_iters=100)
    assert not flag.exists()


@pytest.mark.parametrize(
    ("first", "steps", "is_finished"), [(0, 20, True), (12, 8, True), (20, 0, True), (0, 19, False)]
)
def test_megatron_lm_writes_the_flag_once_train_iters_are_reached(
    first: int, steps: int, is_finished: bool, tmp_path: Path, flag: Path, client: FakeClient
) -> None:
    args = arguments(tmp_path, train_iters=20, iteration=first)
    megatron_lm.setup(args)
    train(steps, args, first=first)
    megatron_lm.shutdown()
    assert flag.exists() is is_finished
