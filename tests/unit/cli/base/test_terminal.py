"""Texts and progress on a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from megatron_ft.cli.base.terminal import plain, track
from megatron_ft.cli.render import report_tables
from megatron_ft.cli.status import status_table


class Screen(io.StringIO):
    """A terminal that keeps what it was told."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("screen", [Screen(), io.StringIO()])
def test_bar_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, screen: io.StringIO) -> None:
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    assert [*track([0, 1, 2], "reading logs", 3)] == [0, 1, 2]
    assert ("reading logs" in screen.getvalue()) == screen.isatty()


def test_plain_is_shared_by_status_and_report_and_escapes_controls() -> None:
    assert plain("a\nb\tc\x1b\udc80d") == r"a b c\x1b\udc80d"
    assert plain("a\nb\tc", keep_lines=True) == "a\nb c"
    assert vars(status_table)["plain"] is plain
    assert vars(report_tables)["plain"] is plain
