"""What a board can't say after what it has said: garbage is no progress, no timeout and no end of the monitoring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from megatron_ft.core.board.consistency import contradiction
from megatron_ft.core.board.layout import ArmedTimeout, BoardSnapshot, SectionView
from tests.support.status_facts import NOW, START, S, snapshot

LOOKED = NOW - 10 * S
STEP, SAVE = SectionView("step", LOOKED - S, 3, 10 * S), SectionView("save", 0, 1, 40 * S)
BEFORE = snapshot(
    sections=(STEP, SAVE), last_transition_ns=LOOKED - S, heartbeats=2, last_heartbeat_ns=LOOKED - S, steps=4
)


@dataclass
class Change:
    """What is different a moment later."""

    fields: dict[str, Any]
    step: SectionView = STEP
    save: SectionView = SAVE

    def made(self) -> BoardSnapshot:
        return BEFORE._replace(**{"sections": (self.step, self.save), **self.fields})


CLOSED = STEP._replace(opened_at_ns=0)
HONEST = {
    "nothing": Change({}),
    "iterations": Change({"iteration": 2, "iterations_seen": 14, "ring_head": 100}),
    "closed": Change({"last_transition_ns": NOW}, step=CLOSED),
    "opened": Change({"last_transition_ns": NOW}, save=SAVE._replace(opened_at_ns=NOW, open_count=2)),
    "opened, told late": Change({}, save=SAVE._replace(opened_at_ns=LOOKED - S // 2, open_count=2)),
    "said again after a renewal": Change({}, save=SAVE._replace(opened_at_ns=START, open_count=2)),
    "one more section": Change({"sections": (STEP, SAVE, SectionView("new", 0, 0, None))}),
    "new timeouts": Change(
        {"timeouts_version": 2, "own_out_of_section_timeout_ns": S}, step=STEP._replace(own_timeout_ns=S)
    ),
    "heartbeat": Change({"heartbeats": 3, "last_heartbeat_ns": NOW}),
    "the end": Change({"closing": True}),
    "armed by the monitor": Change(
        {"armed_out_of_section": ArmedTimeout(S), "armed_heartbeat_ns": S}, step=STEP._replace(armed=ArmedTimeout(S))
    ),
    "facts for learning": Change({"learning_facts": 5, "steps": 5, "saves": 1, "group_timeout_ns": S}),
}
DAMAGED = {
    "another cycle": Change({"cycle": 1}),
    "another rank": Change({"rank": 6}),
    "another start": Change({"start_ns": START + 1}),
    "counts back": Change({"heartbeats": 1}),
    "counts too far": Change({"ring_head": 2**41}),
    "back in time": Change({"last_transition_ns": LOOKED - 2 * S}),
    "heartbeat forgotten": Change({"last_heartbeat_ns": 0}),
    "timeout without version": Change({"own_out_of_section_timeout_ns": S}),
    "section's timeout without version": Change({}, step=STEP._replace(own_timeout_ns=S)),
    "calculated without version": Change({}, step=STEP._replace(is_calculated=True)),
    "calculated out of section without version": Change({"is_out_of_section_calculated": True}),
    "steps back": Change({"steps": 3}),
    "saves too far": Change({"saves": 2**41}),
    "infinite without version": Change({}, step=STEP._replace(own_timeout_ns=None)),
    "flags without version": Change({"heartbeat_flags": 4}),
    "versions back": Change({"timeouts_version": 0, "own_out_of_section_timeout_ns": S}),
    "fewer sections": Change({"sections": (STEP,)}),
    "another name": Change({}, step=STEP._replace(name="stop")),
    "opened long ago": Change({"last_transition_ns": NOW}, save=SAVE._replace(opened_at_ns=START + S, open_count=2)),
    "older than it was": Change({}, step=STEP._replace(opened_at_ns=STEP.opened_at_ns - 5 * S)),
    "closed by nobody": Change({}, step=CLOSED),
    "count of a section back": Change({}, step=STEP._replace(open_count=2)),
}


@pytest.mark.parametrize("name", HONEST)
def test_board_change_of_an_honest_rank_is_no_contradiction(name: str) -> None:
    assert contradiction(BEFORE, HONEST[name].made(), LOOKED) is None


@pytest.mark.parametrize("name", DAMAGED)
def test_board_change_that_no_rank_makes_is_a_contradiction(name: str) -> None:
    assert contradiction(BEFORE, DAMAGED[name].made(), LOOKED)


def test_end_of_monitoring_that_is_taken_back_is_a_contradiction() -> None:
    assert contradiction(BEFORE._replace(closing=True), BEFORE, LOOKED)
