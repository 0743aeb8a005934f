"""The Megatron-LM adapter: where its arguments come from, and simulated faults."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_ft.errors import ConfigError
from megatron_ft.integrations import megatron_lm
from tests.support.megatron_lm_loop import arguments, fresh_state, train
from tests.support.training import FakeClient, clean_environment, client

__all__ = ["clean_environment", "client", "fresh_state"]  # fixtures


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


# --- simulated faults ---
