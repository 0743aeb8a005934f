"""A leader whose lock and decisions are in etcd: the last decision there is of this run, or of an earlier one."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from megatron_ft.exit_codes import TRY_AGAIN_CODE
from megatron_ft.job.parts import LEADER_PARTS
from megatron_ft.job.rules import actions
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.coordinator import FORMER_S, Coordinator
from megatron_ft.job.rules.decisions import Assignment, Decision, DecisionKind, DecisionRecord
from megatron_ft.job.rules.restart_policy import NodeState
from tests.support.job_machines import answers, links

RULES = m.Rules(min_nodes=2, max_nodes=3, max_restarts=3, join_timeout_s=60.0)
LAST = Decision(3, "old.3", DecisionKind.START, 2, 3, restarts=1, founding="old.0")
END = replace(LAST, number=4, id="old.4", kind=DecisionKind.END, code=7, text="it is over")
MADE_AT = 50
"""Revision of etcd's store at which the last decision was made."""


def hello(name: str, **more: Any) -> m.Hello:
    """Of a launcher that was started after the last decision, and knows of none."""
    return m.Hello("job", RULES, name, name, name, **{"since": MADE_AT + 1, **more})


def knowing(name: str, place: int, decision: Decision = LAST) -> m.Hello:
    """Of a launcher that trains by a decision."""
    stands = m.NodeStatus(m.NodePhase.RUNNING, decision.cycle)
    return hello(name, decided=Assignment(decision, place, "s:1"), standing=stands, since=1)


class Leader:
    """One in etcd, and what it does."""

    def __init__(self, last: Decision | None = LAST) -> None:
        record = None if last is None else DecisionRecord(last, "s:1", ("i0", "i1", "i2"), ("h0", "h1", "h2"))
        former = None if record is None else replace(record, revision=MADE_AT)
        self.machine = Coordinator("c", m.JobDefinition("job", RULES), epoch=9, record=former, parts=LEADER_PARTS)
        self.effects: list[actions.CoordinatorEffect] = []
        self.now_s = 0.0
        self._alive: list[int] = []

    def meet(self, *hellos: m.Hello) -> None:
        """Launchers come; one that knows of no decision is ready."""
        for each in hellos:
            link = len(self._alive)
            self._alive.append(link)
            self._do(self.machine.heard(link, each, self.now_s))
            if each.is_fresh:
                self._do(self.machine.heard(link, m.Ready(store=f"{each.name}:1"), self.now_s))

    def hear(self, message: m.FromMember, *links: int) -> None:
        for link in links:
            self._do(self.machine.heard(link, message, self.now_s))

    def silence(self, link: int) -> None:
        self._alive.remove(link)

    def wait(self, to_s: float) -> None:
        while self.now_s < to_s:
            self.now_s = min(to_s, self.now_s + 0.5)
            for link in self._alive:
                self._do(self.machine.heard(link, m.Beat(), self.now_s))
            self._do(self.machine.settle(self.now_s))

    def decisions(self) -> list[Decision]:
        return [each.decision for each in self.effects if isinstance(each, DecisionRecord)]

    def told(self, kind: type) -> list[int]:
        """Launchers that were sent such a message."""
        return links(self.effects, kind)

    def _do(self, effects: list[actions.CoordinatorEffect]) -> None:
        self.effects += answers(self.machine, effects, self.now_s)


def test_new_launchers_begin_another_run_once_no_former_one_has_come_for_a_while() -> None:
    leader = Leader()
    leader.meet(hello("a"), hello("b"), hello("c"))
    leader.wait(FORMER_S - 0.5)
    assert (leader.decisions(), leader.told(Assignment)) == ([], [])
    leader.wait(FORMER_S + 1.0)
    (made,) = leader.decisions()
    assert (made.number, made.cycle, made.restarts) == (0, 0, 0)


def test_launcher_of_a_run_before_the_last_one_is_none_of_it() -> None:
    leader = Leader()
    leader.meet(knowing("x", 0, replace(LAST, id="older.3", founding="older.0")), hello("a"))
    leader.wait(FORMER_S + 5)
    assert leader.decisions() == []
    leader.meet(hello("b"))
    leader.wait(FORMER_S + 40)
    assert leader.decisions()[0].number == 0


def test_too_few_new_launchers_begin_no_run_and_end_with_too_few_nodes() -> None:
    leader = Leader()
    leader.meet(hello("a"), hello("b", standing=m.NodeStatus(m.NodePhase.EXCLUDED)))
    leader.wait(FORMER_S + 1.0)
    assert leader.decisions() == []
    leader = Leader()
    leader.meet(hello("a"))
    leader.wait(RULES.join_timeout_s - 1.0)
    assert leader.decisions() == []
    leader.wait(RULES.join_timeout_s + 1.0)
    (made,) = leader.decisions()
    assert (made.number, made.kind, made.code) == (4, DecisionKind.END, TRY_AGAIN_CODE)
    assert "60 s" in made.text


@pytest.mark.parametrize("more", [{"names_life": True}, {"since": MADE_AT - 1}])
def test_launcher_that_comes_late_to_the_end_of_its_own_run_hears_of_it_at_once(more: dict[str, Any]) -> None:
    leader = Leader(END)
    leader.meet(hello("a", **more))
    assert leader.told(Assignment) == [0]


@pytest.mark.parametrize("since", [MADE_AT, MADE_AT + 1])
def test_new_launcher_alone_believes_the_end_in_etcd_at_its_join_timeout(since: int) -> None:
    leader = Leader(END)
    leader.meet(hello("a", since=since))
    leader.wait(RULES.join_timeout_s - 1.0)
    assert leader.told(Assignment) == []
    leader.wait(RULES.join_timeout_s + 1.0)
    assert leader.told(Assignment) == [0]
    assert leader.decisions() == []


@pytest.mark.parametrize("since", [MADE_AT, MADE_AT + 1])
def test_end_of_the_run_before_is_told_to_its_launchers_and_those_of_the_next_come_again(since: int) -> None:
    leader = Leader(END)
    leader.meet(hello("a", since=since, up_s=1e6), hello("b", since=since))
    leader.wait(1.0)
    leader.meet(knowing("i0", 0))
    assert leader.told(Assignment) == [2]
    assert [each.link for each in leader.effects if isinstance(each, actions.Drop)] == [0, 1]
    leader.meet(hello("a", since=since, up_s=1e6))
    assert leader.told(Assignment) == [2]


def test_leader_that_would_lose_a_node_while_etcd_does_not_answer_ends_instead() -> None:
    leader = Leader(None)
    leader.meet(hello("a"), hello("b"), hello("c"))
    leader.wait(1.0)
    leader.machine.lock_answers = False
    leader.wait(30.0)
    assert actions.Quit() not in leader.effects
    leader.silence(2)
    leader.wait(50.0)
    assert actions.Quit() in leader.effects
    assert leader.told(m.End) == []


@pytest.mark.parametrize(("finished", "away_s"), [((0, 1), 400.0), ((0, 1, 2), 60.0)])
def test_leader_of_a_job_that_is_finishing_stays_though_etcd_does_not_answer_and_a_node_is_silent(
    finished: tuple[int, ...], away_s: float
) -> None:
    leader = Leader(None)
    leader.meet(hello("a"), hello("b"), hello("c"))
    leader.wait(1.0)
    leader.hear(m.Report(0, NodeState.SUCCEEDED), *finished)
    leader.wait(1.5)
    leader.machine.lock_answers = False
    leader.silence(2)
    leader.wait(away_s)
    assert actions.Quit() not in leader.effects
    leader.machine.lock_answers = True
    leader.wait(away_s + 5.0)
    leader.hear(m.Ready(), 0, 1)
    leader.wait(away_s + 6.0)
    assert [each.code for each in leader.decisions() if each.kind is DecisionKind.END] == [0]
