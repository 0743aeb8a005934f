"""Threads of the keeper."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import NoReturn

import pytest

from megatron_ft.memory.keeper.work import BackgroundWorker


def test_unexpected_error_in_a_thread_ends_the_keeper_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    codes, has_ended = list[int](), threading.Event()

    def end(code: int) -> NoReturn:
        codes.append(code)
        has_ended.set()
        while True:
            threading.Event().wait()  # as the original, it doesn't return

    def fail() -> Callable[[], None]:
        raise MemoryError("no room for a buffer")

    monkeypatch.setattr(os, "_exit", end)
    BackgroundWorker("ft_test", lambda _: None).post(fail)
    assert has_ended.wait(10)
    assert codes == [1]
    assert "MemoryError: no room for a buffer" in capfd.readouterr().err
