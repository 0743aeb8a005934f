"""The tables of the agent's phases and of a job's at its coordinator: complete, and those in the docs."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.core import state_table
from megatron_ft.core.agent import phases
from megatron_ft.core.agent.turn import AgentPhase
from megatron_ft.core.coordinator import job_phases
from megatron_ft.core.coordinator.job_phases import CoordinatorMove, CoordinatorPhase, JobState
from megatron_ft.core.state_table import as_table, check

DOCS = Path(__file__).parents[3] / "docs" / "design"
AGENT, JOB = phases.TRANSITIONS, job_phases.TRANSITIONS
ENDS: dict[type[enum.Enum], tuple[enum.Enum, enum.Enum]] = {
    AgentPhase: (AgentPhase.JOINING, AgentPhase.OVER),
    CoordinatorPhase: (CoordinatorPhase.MEETING, CoordinatorPhase.OVER),
}
Table = Mapping[Any, Any]


def checked(table: Table) -> None:
    first, last = ENDS[type(next(iter(table.values())))]
    check(table, first=first, last=last)


@pytest.mark.parametrize("table", [AGENT, JOB], ids=["agent", "job"])
def test_docs_have_the_table_of_the_code(table: Table) -> None:
    checked(table)
    drawn = "\n".join(as_table(table))
    assert any(drawn in page.read_text() for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize(
    ("table", "phase"),
    [
        (AGENT, AgentPhase.ASIDE),
        (AGENT, AgentPhase.EXCLUDED),
        (AGENT, AgentPhase.TERMINATING),
        (JOB, CoordinatorPhase.ENDING),
        (JOB, CoordinatorPhase.RESTARTING),
    ],
)
def test_phase_that_no_event_leads_to_is_found(table: Table, phase: enum.Enum) -> None:
    with pytest.raises(ValueError, match="never reached"):
        checked({pair: after for pair, after in table.items() if after is not phase})


@pytest.mark.parametrize(("table", "phase"), [(AGENT, AgentPhase.EXCLUDED), (JOB, CoordinatorPhase.ENDING)])
def test_phase_that_no_event_ends_is_found(table: Table, phase: enum.Enum) -> None:
    with pytest.raises(ValueError, match="last"):
        checked({pair: after for pair, after in table.items() if pair[0] is not phase})


@pytest.mark.parametrize(
    ("table", "event"), [(AGENT, phases.PhaseEvent.START_GIVEN_UP), (JOB, CoordinatorMove.REQUEST)]
)
def test_event_that_moves_nothing_is_found(table: Table, event: enum.Enum) -> None:
    with pytest.raises(ValueError, match="move nothing"):
        checked({pair: after for pair, after in table.items() if pair[1] is not event})


def test_event_that_a_phase_does_not_list_is_an_error_in_tests_and_else_changes_nothing() -> None:
    state, told = JobState(), list[str]()
    state.move(CoordinatorMove.END)
    with pytest.raises(AssertionError, match="CoordinatorPhase OVER has no transition for ENDED"):
        state.move(CoordinatorMove.ENDED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_table, "unlisted", told.append)
        state.move(CoordinatorMove.ENDED)
    assert state.is_over
    assert told == ["CoordinatorPhase OVER has no transition for ENDED"]
