"""Which nodes are bad, and what an operator is told of them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from megatron_ft.diagnosis.hang_messages import Hang, RankSnapshots
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.job.rules.faults import Fault, FaultKind, advice, back_again, bad_nodes, fault_of
from megatron_ft.job.rules.lives import Life, Lives
from megatron_ft.job.rules.restart_policy import Outcome
from megatron_ft.link.facts.launcher import CauseKind
from tests.support.agents import HANG, verdict
from tests.support.machines import Job


def a_fault(node: str, kind: FaultKind = FaultKind.LOST, cycle: int = 0, **more: bool) -> Fault:
    return Fault(node=node, cycle=cycle, kind=kind, text=f"cycle {cycle}", **more)


# -- which are bad --------------------------------------------------------------------------------------------


def test_a_lost_node_is_bad_until_it_is_back() -> None:
    faults = [a_fault("a"), a_fault("b")]
    assert bad_nodes(faults) == {"a": "cycle 0", "b": "cycle 0"}
    assert bad_nodes(back_again(faults, {"a"})) == {"b": "cycle 0"}


def test_node_that_is_lost_again_or_was_left_out_stays_bad_when_it_is_back() -> None:
    faults = [a_fault("a", back=True), a_fault("a", cycle=3, back=True)]
    assert bad_nodes(faults) == {"a": "2 failures: cycle 0; cycle 3"}
    assert bad_nodes(back_again([a_fault("a", FaultKind.LEFT)], {"a"})) == {"a": "cycle 0"}


@pytest.mark.parametrize(("advanced", "bad"), [(True, {"a": "2 failures: cycle 0; cycle 1"}), (False, {})])
def test_ranks_that_fail_where_the_job_gets_on_tell_of_their_node(advanced: bool, bad: dict[str, str]) -> None:
    faults = [a_fault("a", FaultKind.RANK, cycle, advanced=advanced) for cycle in (0, 1)]
    assert bad_nodes(faults) == bad


def test_a_node_is_back_in_all_lives() -> None:
    lives = Lives().begun(Life(job="1", faults=(a_fault("a"),))).begun(Life(job="2"))
    assert lives.bad_nodes() == {"a": "cycle 0"}
    assert lives.back(["a"]).bad_nodes() == {}
    assert Lives.parse(lives.back(["a"]).to_text()) == lives.back(["a"])


def link(*nodes: str, cycle: int = 0) -> Fault:
    return Fault(node="", cycle=cycle, kind=FaultKind.LINK, text="connection lost", nodes=nodes)


@pytest.mark.parametrize(
    ("links", "bad"),
    [
        ([link("a", "b", "c")], []),
        ([link("a", "b", "c"), link("c", "d")], ["c"]),
        ([link("a", "b"), link("a", "b")], []),  # either may be at fault
        ([link("a", "b"), link("b", "c"), link("c", "d")], []),
        ([link("a", "b"), a_fault("b", FaultKind.RANK), link("b", "c")], ["b"]),
    ],
)
def test_node_is_bad_if_it_alone_is_common_to_all_lost_connections_of_two_cycles(
    links: list[Fault], bad: list[str]
) -> None:
    assert list(bad_nodes(links)) == bad
    life = Lives().begun(Life(job="1", faults=tuple(links)))
    assert list(Lives.parse(life.to_text()).bad_nodes()) == bad


CRASHED = verdict(node=0, kind=CauseKind.CRASH, name="a", rank=1, text="rank 1 exited with code 1")


@pytest.mark.parametrize(
    ("changes", "of_cause", "kind"),
    [
        ({}, {}, FaultKind.RANK),
        ({}, {"kind": CauseKind.MEMBERSHIP}, FaultKind.LOST),
        ({"outcome": Outcome.MEMBERSHIP}, {"kind": CauseKind.MEMBERSHIP}, FaultKind.LEFT),
        ({}, {"host": "", "hosts": ("b", "c")}, FaultKind.LINK),
        ({}, {"follows": True}, None),
        ({}, {"kind": CauseKind.REQUEST}, None),
        ({"node": None}, {}, None),
        ({"outcome": Outcome.STOPPED}, {}, None),
        ({"outcome": Outcome.SUCCEEDED}, {}, None),
    ],
)
def test_fault_is_that_of_the_node_that_the_verdict_names_unless_its_end_followed_or_was_asked_for(
    changes: dict[str, Any], of_cause: dict[str, Any], kind: FaultKind | None
) -> None:
    found = fault_of(replace(CRASHED, cause=replace(CRASHED.cause, **of_cause), **changes))
    link = kind is FaultKind.LINK
    assert found == (
        kind and Fault(node="" if link else "a", cycle=0, kind=kind, text=CRASHED.cause.text, nodes=("b", "c") * link)
    )


def test_nodes_of_a_lost_connection_are_told_to_later_cycles_and_lives() -> None:
    """One node is common to the lost connections of two cycles, also where its ranks have exited before."""
    job = Job(min_nodes=3)
    nodes = job.start("abc")
    for cycle, cut in enumerate(((0, 2), (1, 2))):
        found = replace(HANG, cycle=cycle, kind="lost peer", error="gloo: Connection reset by peer", rank=cut[0])
        nodes[cut[0]].do(nodes[cut[0]].member.tell(Hang(cycle, found), job.now_s))
        job.run()
        for place, node in enumerate(nodes):
            raised = "RuntimeError: gloo: Connection reset by peer" if place in cut else ""
            note = RankSnapshot(rank=place, state="" if raised else "S", has_stack=not raised, raised=raised)
            node.do(node.member.tell(RankSnapshots(cycle, (note,)), job.now_s))
        job.run(3.0)
    faults = [fault_of(verdict) for verdict in nodes[1].verdicts]
    assert [fault and fault.nodes for fault in faults] == [("a", "c"), ("b", "c")]
    assert list(bad_nodes(filter(None, faults))) == ["c"]


def test_host_that_is_back_is_told_of_by_the_coordinator() -> None:
    job = Job(min_nodes=2, max_nodes=2)
    a, b = job.start("ab")
    b.dies()
    job.run(2.0)
    job.start("b")
    job.run(2.0)
    a.fails()
    job.run(2.0)
    told = [each.decision.back for each in job.decided if each.decision.cycle >= 0]
    assert told == [(), ("b",), ("b",)]


# -- what an operator can do -----------------------------------------------------------------------------------


def test_commands_are_told() -> None:
    assert advice("slurm", "n1", "it's hot") == (
        "bad node n1: it's hot. To drain it: "
        "scontrol update NodeName=n1 State=DRAIN 'Reason=it'\"'\"'s hot'; to do without it: sbatch --exclude=n1"
    )
    assert "kubectl cordon" in advice("kubernetes", "job-3", "lost")
    assert advice("none", "n1", "lost") == "bad node n1: lost"


def test_a_hang_is_the_fault_of_the_host_of_the_rank_that_is_to_blame() -> None:
    """The node that finds it waits for that rank, like all the others."""
    job = Job(min_nodes=2)
    nodes = job.start("abc")
    nodes[0].do(nodes[0].member.tell(Hang(0, HANG), job.now_s))
    job.run()
    for place, node in enumerate(nodes):
        waits_in, state = ("", "T") if place == 2 else ("all_reduce", "S")
        note = RankSnapshot(rank=place, host=node.name, state=state, has_stack=True, waits_in=waits_in)
        node.do(node.member.tell(RankSnapshots(0, (note,)), job.now_s))
    job.run(0.5)
    (verdict,) = nodes[1].verdicts
    fault = fault_of(verdict)
    assert fault is not None
    assert (verdict.cause.rank, verdict.cause.host, fault.node, verdict.cause_for(1).host) == (2, "c", "c", "c")
