"""Texts and progress on a terminal."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from megatron_ft.cli.base.terminal import plain, track
from megatron_ft.cli.render import report_tables
from megatron_ft.cli.status import status_table


class Screen(io.StringIO):
    """A terminal that keeps what it was told."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("takes_long", [True, False])
def test_bar_is_shown_on_a_terminal_once_work_takes_long(monkeypatch: pytest.MonkeyPatch, takes_long: bool) -> None:
    class Timer(threading.Timer):
        def start(self) -> None:
            assert self.interval == 2.0
            if takes_long:
                self.function()

        def join(self, timeout: float | None = None) -> None:
            assert self.finished.is_set()

    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(threading, "Timer", Timer)
    assert [*track([0, 1, 2], "reading logs", 3)] == [0, 1, 2]
    assert ("reading logs" in screen.getvalue()) == takes_long


def test_bar_is_not_shown_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    assert [*track([1, 2], "reading", 2)] == [1, 2]
    assert file.getvalue() == ""


def test_plain_is_shared_by_status_and_report_and_escapes_controls() -> None:
    assert plain("a\nb\tc\x1b\udc80d") == r"a b c\x1b\udc80d"
    assert plain("a\nb\tc", keep_lines=True) == "a\nb c"
    assert vars(status_table)["plain"] is plain
    assert vars(report_tables)["plain"] is plain
