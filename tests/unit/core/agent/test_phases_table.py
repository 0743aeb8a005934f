"""The table of the agent's phases: complete, and the one in the docs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ft.core.agent.phases import TRANSITIONS, PhaseEvent, as_table, check
from megatron_ft.core.agent.turn import AgentPhase

PAGE = Path(__file__).parents[4] / "docs" / "design" / "agent.md"


def test_docs_have_the_table_of_the_code() -> None:
    assert "\n".join(as_table()) in PAGE.read_text()


@pytest.mark.parametrize("phase", [AgentPhase.ASIDE, AgentPhase.EXCLUDED, AgentPhase.TERMINATING])
def test_phase_that_no_event_leads_to_is_found(phase: AgentPhase) -> None:
    with pytest.raises(ValueError, match="never reached"):
        check({pair: after for pair, after in TRANSITIONS.items() if after is not phase})


def test_phase_that_no_event_ends_is_found() -> None:
    with pytest.raises(ValueError, match="last"):
        check({pair: after for pair, after in TRANSITIONS.items() if pair[0] is not AgentPhase.EXCLUDED})


def test_event_that_moves_nothing_is_found() -> None:
    with pytest.raises(ValueError, match="move nothing"):
        check({pair: after for pair, after in TRANSITIONS.items() if pair[1] is not PhaseEvent.START_GIVEN_UP})
