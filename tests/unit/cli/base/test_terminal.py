"""Progress on a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from megatron_ft.cli.base.terminal import track


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
