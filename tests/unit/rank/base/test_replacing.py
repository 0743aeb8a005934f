"""A function that is called once a module is imported."""

from __future__ import annotations

import importlib
import sys

import pytest

from megatron_ft.rank.base.replacing import ImportHook


def test_functions_that_wait_for_a_module_are_all_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "webbrowser", raising=False)
    finders, told = list(sys.meta_path), list[str]()
    waiting = [
        ImportHook("webbrowser", lambda module, name=name: told.append(f"{name} {module.__name__}")) for name in "ab"
    ]
    for each in [*waiting, waiting[0]]:
        each.begin()
    try:
        module = importlib.import_module("webbrowser")
        waiting[1].begin()  # it is imported already
    finally:
        for each in waiting:
            each.end()
    assert sorted(told) == ["a webbrowser", "b webbrowser", "b webbrowser"]
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert sys.meta_path == finders
