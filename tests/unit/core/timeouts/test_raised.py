"""Learned timeouts that have ended a rank, in the next cycle."""

from __future__ import annotations

import pytest

from megatron_ft import fault_tolerance as ft
from megatron_ft.core.timeouts.budget_rule import Known
from megatron_ft.core.timeouts.in_force import SectionTimeouts
from megatron_ft.core.timeouts.raised import RAISED_TIMEOUTS, RaisedTimeouts, from_text
from megatron_ft.rank.client.calculating import Knowledge
from tests.support.training import Bench, bench, clean_environment, save_checkpoint, train

__all__ = ["bench", "clean_environment"]  # fixtures


def test_the_next_cycle_has_the_double_and_the_one_after_it_only_if_it_killed_again() -> None:
    raised = RaisedTimeouts()
    assert raised.environment(0) == {}
    raised.note_kill("step", 0)
    raised.note_kill("step", 0)  # two ranks
    assert raised.factors(1) == {"step": 2.0}
    assert raised.factors(2) == {}
    raised.note_kill("step", 1)
    raised.note_kill("out_of_section", 1)
    assert raised.factors(2) == {"step": 4.0, "out_of_section": 2.0}
    raised.note_kill("step", 5)
    assert raised.factors(6) == {"step": 2.0}


def test_what_the_ranks_are_told_is_what_they_read() -> None:
    raised = RaisedTimeouts()
    raised.note_kill("a 'step'", 3)
    assert from_text(raised.environment(4)[RAISED_TIMEOUTS]) == {"a 'step'": 2.0}


@pytest.mark.parametrize("text", ["", "x", "[1]", '{"step": "2"}', '{"step": -1}', '{"step": 0.5}', '{"step": 1e999}'])
def test_of_what_is_not_ours_nothing_is_believed(text: str) -> None:
    assert from_text(text) == {}


def test_only_learned_timeouts_are_raised() -> None:
    knowledge = Knowledge()
    knowledge.raised = {"step": 2.0, "save": 4.0, "out_of_section": 2.0}
    knowledge.first_timeouts = {"step": 100.0}
    knowledge.suspect_after = {"step": 4.0, "save": 8.0}
    timeouts = SectionTimeouts({"step": 10.0, "save": 20.0, "load": None}, 7.0, {"step"}, False)
    enforced, first, suspect = knowledge.enforced(timeouts, 5.0)
    assert enforced.section == {"step": 20.0, "save": 20.0, "load": None}
    assert enforced.out_of_section == 7.0
    assert first == {"step": 200.0}
    assert suspect == {}
    knowledge.raised = {}
    assert knowledge.enforced(timeouts, 5.0).suspect == {"step": 5.0, "save": 8.0}


@pytest.mark.parametrize(("reference_s", "raised_s"), [(30.0, 60.0), (8.0, 20.0), (None, 20.0)])
def test_what_ended_a_rank_is_raised_from_the_references_timeout_if_that_is_more(
    reference_s: float | None, raised_s: float
) -> None:
    knowledge = Knowledge()
    knowledge.raised, knowledge.known = {"step": 2.0}, {"step": Known(usual_reference_s=reference_s)}
    enforced, _, _ = knowledge.enforced(SectionTimeouts({"step": 10.0}, None, {"step"}, False), 5.0)
    assert enforced.section == {"step": raised_s}


def test_a_timeout_comes_down_when_its_section_has_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    bench.config.calculated_timeout_floor = 2.0
    bench.learn()
    monkeypatch.setenv(RAISED_TIMEOUTS, '{"step": 4.0}')
    state = bench.start()
    out = capfd.readouterr().out
    assert "the timeout of 'step' terminated a rank in the last cycle: it is multiplied by 4 until" in out

    def enforced() -> dict[str, int | None]:
        return {s.name: s.timeout_ns for s in state.rank_monitor_client._board.snapshot().sections}

    assert enforced()["step"] == 8_000_000_000
    assert enforced()["checkpointing"] == 2_000_000_000
    train(state, 20)
    assert enforced()["step"] == 8_000_000_000
    save_checkpoint(state)
    assert enforced()["step"] == 2_000_000_000
    ft.shutdown(state)
