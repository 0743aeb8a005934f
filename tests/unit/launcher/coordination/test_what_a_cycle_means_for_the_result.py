"""Who may say how the job has ended: a launcher that has a place in the last cycle."""

from __future__ import annotations

from unittest import mock

import pytest

from megatron_ft.job.rules import actions
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.decisions import Assignment, Decision, DecisionKind
from megatron_ft.launcher.coordination.coordination import Coordination
from megatron_ft.link.reactor import Reactor

CYCLE = Decision(0, "c.1", DecisionKind.START, 0, 2)


@pytest.mark.parametrize("place", [None, 0])
def test_a_launcher_that_stands_by_leaves_it_to_the_others(place: int | None) -> None:
    rules = m.Rules(min_nodes=2, max_nodes=2, max_restarts=3)
    heard: list[object] = []
    coordination = Coordination(
        m.Identity("job", rules, "i", "host", "host", "host:1"),
        transport=lambda _listener: mock.Mock(),
        open_store=lambda: "host:2",
        reactor=Reactor(),
        say=lambda _text: None,
        on_decision=heard.append,
    )
    coordination.opened()
    coordination.heard(m.Admitted())
    coordination.heard(Assignment(CYCLE, place))
    kinds = [type(each) for each in heard if isinstance(each, actions.Begin | actions.StandBy)]
    assert kinds == [actions.StandBy if place is None else actions.Begin]
