"""What a board can't say after what it has said: a zero or a small number is no reason to end a rank."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ft.link.base.layout import ArmedTimeout, BoardSnapshot, SectionView
from megatron_ft.monitor.rules.consistency import contradiction
from tests.support.status_facts import NOW, S, snapshot

LOOKED = NOW - 10 * S
STEP, SAVE = SectionView("step", LOOKED - S, 3, 10 * S), SectionView("save", 0, 1, 40 * S)
BEFORE = snapshot(
    sections=(STEP, SAVE),
    last_transition_ns=LOOKED - S,
    heartbeats=2,
    last_heartbeat_ns=LOOKED - S,
    steps=4,
    warmup_iterations=3,
)


def later(step: SectionView = STEP, save: SectionView = SAVE, **fields: Any) -> BoardSnapshot:
    """The board a moment later, with what is different."""
    return BEFORE._replace(**{"sections": (step, save), **fields})


CLOSED = STEP._replace(opened_at_ns=0)
HONEST = {
    "nothing": later(),
    "closed": later(last_transition_ns=NOW, step=CLOSED),
    "opened": later(last_transition_ns=NOW, save=SAVE._replace(opened_at_ns=NOW, open_count=2)),
    "one more section": later(sections=(STEP, SAVE, SectionView("new", 0, 0, None))),
    "new timeouts": later(timeouts_version=2, own_out_of_section_timeout_ns=S, step=STEP._replace(own_timeout_ns=S)),
    "heartbeat": later(heartbeats=3, last_heartbeat_ns=NOW),
    "the end": later(closing=True),
    "armed by the monitor": later(
        armed_out_of_section=ArmedTimeout(S), armed_heartbeat_ns=S, step=STEP._replace(armed=ArmedTimeout(S))
    ),
}
DAMAGED = {
    "an earlier start": later(start_ns=5),
    "no warm-up": later(warmup_iterations=0),
    "counts back": later(heartbeats=1),
    "back in time": later(last_transition_ns=LOOKED - 2 * S),
    "heartbeat forgotten": later(last_heartbeat_ns=0),
    "timeout without version": later(own_out_of_section_timeout_ns=S),
    "versions back": later(timeouts_version=0, own_out_of_section_timeout_ns=S),
    "another name": later(step=STEP._replace(name="stop")),
    "fewer sections": later(sections=(STEP,)),
    "closed by nobody": later(step=CLOSED),
    "count of a section back": later(step=STEP._replace(open_count=2)),
}


@pytest.mark.parametrize("name", HONEST)
def test_board_change_of_an_honest_rank_is_no_contradiction(name: str) -> None:
    assert contradiction(BEFORE, HONEST[name]) is None


@pytest.mark.parametrize("name", DAMAGED)
def test_board_change_that_no_rank_makes_is_a_contradiction(name: str) -> None:
    assert contradiction(BEFORE, DAMAGED[name])
