"""What a board can't say after what it has said: a zero or a small number is no reason to end a rank."""

from __future__ import annotations

from dataclasses import dataclass
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
    "one more section": Change({"sections": (STEP, SAVE, SectionView("new", 0, 0, None))}),
    "new timeouts": Change(
        {"timeouts_version": 2, "own_out_of_section_timeout_ns": S}, step=STEP._replace(own_timeout_ns=S)
    ),
    "heartbeat": Change({"heartbeats": 3, "last_heartbeat_ns": NOW}),
    "the end": Change({"closing": True}),
    "armed by the monitor": Change(
        {"armed_out_of_section": ArmedTimeout(S), "armed_heartbeat_ns": S}, step=STEP._replace(armed=ArmedTimeout(S))
    ),
    "facts for learning": Change({"learning_facts": 5, "steps": 5, "saves": 1}),
}
DAMAGED = {
    "an earlier start": Change({"start_ns": 5}),
    "no warm-up": Change({"warmup_iterations": 0}),
    "counts back": Change({"heartbeats": 1}),
    "back in time": Change({"last_transition_ns": LOOKED - 2 * S}),
    "heartbeat forgotten": Change({"last_heartbeat_ns": 0}),
    "timeout without version": Change({"own_out_of_section_timeout_ns": S}),
    "section's timeout without version": Change({}, step=STEP._replace(own_timeout_ns=S)),
    "steps back": Change({"steps": 3}),
    "infinite without version": Change({}, step=STEP._replace(own_timeout_ns=None)),
    "versions back": Change({"timeouts_version": 0, "own_out_of_section_timeout_ns": S}),
    "another name": Change({}, step=STEP._replace(name="stop")),
    "fewer sections": Change({"sections": (STEP,)}),
    "closed by nobody": Change({}, step=CLOSED),
    "count of a section back": Change({}, step=STEP._replace(open_count=2)),
}


@pytest.mark.parametrize("name", HONEST)
def test_board_change_of_an_honest_rank_is_no_contradiction(name: str) -> None:
    assert contradiction(BEFORE, HONEST[name].made()) is None


@pytest.mark.parametrize("name", DAMAGED)
def test_board_change_that_no_rank_makes_is_a_contradiction(name: str) -> None:
    assert contradiction(BEFORE, DAMAGED[name].made())
