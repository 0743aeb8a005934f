"""What ranks leave behind is waited for, and everything else is served meanwhile."""

from __future__ import annotations

from typing import Any, cast

import pytest

from megatron_ft.launcher.processes.worker import Termination
from megatron_ft.link.linux.processes import ProcessStat, read_stat


class Served:
    """A reactor that counts how often it was left to serve others."""

    def __init__(self) -> None:
        self.times = 0

    def run_once(self, _timeout_s: float) -> None:
        self.times += 1


def test_leftovers_that_replace_each_other_are_looked_for_between_other_events(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = cast(ProcessStat, cast(Any, read_stat(1))._replace(pid=2**22 + 1))
    listings = [[gone], [gone], []]
    reactor = Served()
    termination = Termination(
        cast(Any, reactor), known_children=set[int], in_a_hurry=lambda: False, say=lambda _text: None
    )
    monkeypatch.setattr(termination, "_left_behind", lambda _ended: listings.pop(0))
    assert termination._wait_gone([], [gone], 60.0, patient=False) == []
    assert (listings, reactor.times) == ([], 3)
