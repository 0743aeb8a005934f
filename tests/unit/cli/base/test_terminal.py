"""Texts and progress on a terminal."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator

import pytest

from megatron_ft.cli.base import terminal
from megatron_ft.cli.base.terminal import plain, track
from megatron_ft.cli.render import report_tables
from megatron_ft.cli.status import status_table


class Screen(io.StringIO):
    """A terminal that keeps what it was told."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("long_s", "is_shown"), [(0.05, True), (60.0, False)])
def test_bar_is_shown_on_a_terminal_once_work_takes_long(
    monkeypatch: pytest.MonkeyPatch, long_s: float, is_shown: bool
) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(terminal, "_LONG_S", long_s)

    def work() -> Iterator[int]:
        until_s = time.monotonic() + 30.0
        for number in range(3):
            yield number
            while is_shown and "reading logs" not in screen.getvalue() and time.monotonic() < until_s:
                time.sleep(0.01)

    assert [*track(work(), "reading logs", 3)] == [0, 1, 2]
    assert ("reading logs" in screen.getvalue()) == is_shown


def test_bar_is_not_shown_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setattr(terminal, "_LONG_S", 0.0)
    assert [*track([1, 2], "reading", 2)] == [1, 2]
    assert file.getvalue() == ""


def test_plain_is_shared_by_status_and_report_and_escapes_controls() -> None:
    assert plain("a\nb\tc\x1b\udc80d") == r"a b c\x1b\udc80d"
    assert plain("a\nb\tc", keep_lines=True) == "a\nb c"
    assert vars(status_table)["plain"] is plain
    assert vars(report_tables)["plain"] is plain
