"""The fork server between two cycles."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

from megatron_ft.run_ahead.server import ForkServer


def test_order_that_comes_is_heard_before_further_modules_that_ranks_have_loaded() -> None:
    server: Any = ForkServer.__new__(ForkServer)
    imported: list[str] = []
    loaded = [["json.one", "json.two", "json.three", "nowhere.one"], []]
    server._awaited, server._loaded = [], SimpleNamespace(take=lambda: loaded.pop(0))
    server._watch, server._import_module = contextlib.nullcontext(), imported.append
    assert "json" in sys.modules
    asks = SimpleNamespace(poll=lambda _: len(imported) == 2)
    server._import_loaded(asks)
    assert imported == ["json.one", "json.two"]
    server._import_loaded(SimpleNamespace(poll=lambda _: False))
    assert imported == ["json.one", "json.two", "json.three"]
