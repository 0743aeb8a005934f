"""The reference's names: where each is served from, under which version, and the classes behind them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest

from megatron_ft.launcher.base.rank_environment import rank_environment
from megatron_ft.rank.base.agreement import RankInfo
from megatron_ft.rank.reference.finder import _Finder
from megatron_ft.rank.reference.served import version_shown
from megatron_ft.run_ahead.startup import STARTUP


def test_environment_of_ranks_has_the_startup_directory_and_switch() -> None:
    env = rank_environment({"PYTHONPATH": "a", "X": "1"}, reference_names=True)
    assert env == {"PYTHONPATH": f"{STARTUP}:a", "X": "1", "MEGATRON_FT_REFERENCE_NAMES": "on"}
    assert rank_environment(env, reference_names=True) == env, "of a launcher that a rank has started"
    assert rank_environment(env, reference_names=False) == {"PYTHONPATH": f"{STARTUP}:a", "X": "1"}
    plain = {"X": "1"}
    assert rank_environment(plain, reference_names=False) == plain
    assert rank_environment(plain, reference_names=False, watches=True) == {"PYTHONPATH": STARTUP, "X": "1"}
    assert Path(STARTUP, "sitecustomize.py").is_file()


@pytest.mark.parametrize(
    ("installed_version", "shown"),
    [
        (None, "0.7.0+megatron.ft.1"),
        ("unknown", "0.7.0+megatron.ft.1"),
        ("0.4.1", "0.4.1+megatron.ft.1"),
        ("0.6.0.dev3+abc", "0.6.0.dev3+abc.megatron.ft.1"),
    ],
)
def test_version_shown_marks_our_client_behind_the_installed_version(installed_version: str | None, shown: str) -> None:
    assert version_shown(installed_version, "1") == shown


def test_rank_info_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    found = RankInfo.get_for_current_rank()
    assert (found.global_rank, found.local_rank, found.pid) == (3, 1, os.getpid())
    monkeypatch.delenv("RANK")
    with pytest.raises(RuntimeError, match="RANK isn't set"):
        RankInfo.get_for_current_rank()


def test_local_checkpoints_are_left_to_the_package_without_xxhash(monkeypatch: pytest.MonkeyPatch) -> None:
    name, hooks = "nvidia_resiliency_ext.checkpointing.local.base_state_dict", "nvidia_resiliency_ext.fault_tolerance"
    finder = _Finder()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert finder.find_spec(name) is not None
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert finder.find_spec(name) is None
    assert finder.find_spec(hooks) is not None
