"""The Megatron-LM adapter: its names, its one state, and what Megatron-LM gets wrong."""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_ft.errors import ConfigError
from megatron_ft.integrations import megatron_lm
from tests.support.megatron_lm_loop import CALLS, all_hooks, arguments, fresh_state, save, train
from tests.support.training import FakeClient, bench, clean_environment, client

__all__ = ["bench", "clean_environment", "client", "fresh_state"]  # fixtures

# --- names ---


def test_functions_that_megatron_lm_calls_take_its_arguments() -> None:
    for name, given in CALLS.items():
        signature = inspect.signature(getattr(megatron_lm, name))
        signature.bind(**dict.fromkeys(given, False))
        signature.bind(*given)
    inspect.signature(megatron_lm.setup).bind(argparse.Namespace())  # older versions give them
    assert set(megatron_lm.__all__) == {*CALLS}


# --- one state in the module ---


def test_run_reports_iterations_sections_and_updates(tmp_path: Path, client: FakeClient) -> None:
    args = arguments(tmp_path, calc_ft_timeouts=True)
    megatron_lm.setup(args)
    assert megatron_lm.get_rank_monitor_client() is client
    assert client.open == ["setup"]
    megatron_lm.on_checkpoint_loaded(is_local_chkpt=False)
    train(20, args, first=100)
    save()
    for _ in range(3):
        megatron_lm.on_eval_step_start()
        megatron_lm.on_eval_step_end()
    megatron_lm.shutdown()
    assert [call for call in client.calls if call[0] == "iteration"] == [("iteration", n) for n in range(100, 120)]
    steps = [("start", "step"), ("end", "step")]
    saving = [("start", "checkpointing"), ("end", "checkpointing")]
    assert client.sections() == [("start", "setup"), ("end", "setup"), *steps * 19, *saving, *steps * 2]
    everything = ["setup", "step", "checkpointing"]
    assert client.calculations() == [(everything, False), (everything, True)]
    assert megatron_lm.get_rank_monitor_client() is None
    assert (tmp_path / "ckpt" / "ft_state.json").exists()


def test_warm_up_steps_are_the_users(tmp_path: Path, client: FakeClient) -> None:
    megatron_lm.setup(arguments(tmp_path, ft_num_warmup_iters=4))
    assert client.num_warmup_iters == 4
    train(6)
    assert client.sections().count(("start", "step")) == 2
    for _ in range(6):
        megatron_lm.on_eval_step_start()
        megatron_lm.on_eval_step_end()
    assert client.sections().count(("start", "step")) == 4


def test_hooks_after_megatron_lm_shut_the_client_down_do_nothing(
    tmp_path: Path, client: FakeClient, capfd: pytest.CaptureFixture[str]
) -> None:
    """Some versions do, at the end of train(); evaluation and shutdown() come after it."""
    megatron_lm.setup(arguments(tmp_path, calc_ft_timeouts=True))
    train(20)
    megatron_lm.get_rank_monitor_client().shutdown_workload_monitoring()
    before = client.sections()
    capfd.readouterr()
    all_hooks()
    megatron_lm.shutdown()
    assert megatron_lm.get_rank_monitor_client() is None
    assert client.sections() == before
    assert client.calculations() == []
    assert capfd.readouterr().err == ""


# --- what Megatron-LM gets wrong ---


def test_shutdown_closes_setup_when_no_step_was_made(
    tmp_path: Path, client: FakeClient, capfd: pytest.CaptureFixture[str]
) -> None:
    """A job that resumes after its last iteration: an open "setup" isn't counted, and the next run never knows it."""
    megatron_lm.setup(arguments(tmp_path, calc_ft_timeouts=True))
    megatron_lm.on_checkpoint_loaded(is_local_chkpt=False)
    megatron_lm.shutdown()
    assert client.open == []
    assert client.calls == [("start", "setup"), ("end", "setup"), ("calculate", ["setup"], False), ("shutdown",)]
    assert capfd.readouterr().err == ""


# --- where its arguments come from ---


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Megatron-LM, as far as it is asked: ``global_args`` are what initialize_megatron will have set."""
    fake = SimpleNamespace(global_args=None, parsed=None)
    global_vars, arguments = ModuleType("global_vars"), ModuleType("arguments")

    def get_args() -> Any:
        assert fake.global_args is not None, "args is not initialized."
        return fake.global_args

    def parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Any:
        assert ignore_unknown_args, "flags of an extra_args_provider would end the process"
        return fake.parsed

    global_vars.get_args, arguments.parse_args = get_args, parse_args  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", global_vars)
    monkeypatch.setitem(sys.modules, "megatron.training.arguments", arguments)
    return fake


def test_setup_before_megatron_lm_is_initialised_parses_the_command_line(
    tmp_path: Path, megatron: SimpleNamespace, client: FakeClient
) -> None:
    """Newer versions call setup() first: the command line is parsed for it, and curr_iteration is elsewhere later."""
    megatron.parsed = arguments(tmp_path)
    megatron_lm.setup()
    assert client.open == ["setup"]
    megatron_lm.on_checkpointing_start()
    megatron_lm.on_checkpointing_end(is_async_finalization=True)
    train(1)
    assert not [call for call in client.calls if call[0] == "iteration"]
    megatron.global_args = SimpleNamespace(curr_iteration=40)
    train(1)
    assert [call for call in client.calls if call[0] == "iteration"] == [("iteration", 40)]


def test_setup_without_arguments_or_megatron_lm_raises_one_line(
    monkeypatch: pytest.MonkeyPatch, client: FakeClient
) -> None:
    monkeypatch.setitem(sys.modules, "megatron.training", None)  # megatron-core 0.17 brings it along
    with pytest.raises(ConfigError, match=r"can't be imported.*give them, setup\(args\)") as error:
        megatron_lm.setup()
    assert "\n" not in str(error.value)
