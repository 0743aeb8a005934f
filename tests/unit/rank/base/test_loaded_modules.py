"""What a forked rank has loaded since its fork, told to the server of the next cycles."""

from __future__ import annotations

import mmap
import os
import sys
from types import ModuleType

import pytest

from megatron_ft.rank.base.loaded_modules import SIZE, LoadedModules


def test_modules_loaded_since_the_fork_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = mmap.mmap(-1, SIZE)
    server, rank, other = LoadedModules(memory), LoadedModules(memory), LoadedModules(memory)
    rank.prepare_fork()
    rank.begin({**os.environ, "LOADED": "1"})
    other.begin(None)
    monkeypatch.setenv("LOADED", "1")
    monkeypatch.setenv("RANK", "1")  # the rank's own: no difference
    assert server.take() == []
    for name in ("loaded.a", "no name", "loaded.b"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        other.note()
        rank.note()
    assert server.take() == ["loaded.a", "loaded.b"]
    rank.note()
    assert server.take() == []


def test_modules_loaded_under_another_environment_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have read a variable that the script had set."""
    server = rank = LoadedModules(mmap.mmap(-1, SIZE))
    rank.prepare_fork()
    rank.begin({**os.environ})
    monkeypatch.setenv("LOADED", "1")
    monkeypatch.setitem(sys.modules, "loaded.a", ModuleType("loaded.a"))
    rank.note()
    assert server.take() == []
