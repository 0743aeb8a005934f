"""The table of the agent's phases is complete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from megatron_ft.launcher.rules.agent import TRANSITIONS, AgentPhase, PhaseEvent
from megatron_ft.link.base import state_table
from megatron_ft.link.base.state_table import check, follow

Table = Mapping[Any, Any]


def checked(table: Table) -> None:
    check(table, first=AgentPhase.JOINING, last=AgentPhase.OVER)


@pytest.mark.parametrize("phase", [AgentPhase.ASIDE, AgentPhase.EXCLUDED, AgentPhase.TERMINATING])
def test_phase_that_no_event_leads_to_is_found(phase: AgentPhase) -> None:
    with pytest.raises(ValueError, match="never reached"):
        checked({pair: after for pair, after in TRANSITIONS.items() if after is not phase})


def test_phase_that_no_event_ends_is_found() -> None:
    with pytest.raises(ValueError, match="last"):
        checked({pair: after for pair, after in TRANSITIONS.items() if pair[0] is not AgentPhase.EXCLUDED})


def test_event_that_moves_nothing_is_found() -> None:
    with pytest.raises(ValueError, match="move nothing"):
        checked({pair: after for pair, after in TRANSITIONS.items() if pair[1] is not PhaseEvent.START_GIVEN_UP})


def test_event_that_a_phase_does_not_list_is_an_error_in_tests_and_else_changes_nothing() -> None:
    told = list[str]()
    with pytest.raises(AssertionError, match="AgentPhase OVER has no transition for FIT"):
        follow(TRANSITIONS, AgentPhase.OVER, PhaseEvent.FIT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_table, "unlisted", told.append)
        assert follow(TRANSITIONS, AgentPhase.OVER, PhaseEvent.FIT) is AgentPhase.OVER
    assert told == ["AgentPhase OVER has no transition for FIT"]
