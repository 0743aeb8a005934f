"""What the coordinator tells users while a cycle runs or nodes meet: which line, when, and to whom."""

from __future__ import annotations

import pytest

from megatron_ft.job.rules.messages import NodeUnfit
from megatron_ft.job.rules.restart_policy import NodeState
from tests.support.machines import Job


def test_a_round_that_takes_long_says_for_whom_it_waits_and_again_after_ten_times_as_long() -> None:
    job = Job(min_nodes=3)
    (a,) = job.start("a")
    job.run(2.9)
    assert a.lines == []
    (b,) = job.start("b")
    job.run(1.2)
    told = "waiting for 1 more node (2 of 3 are here: a, b)"
    assert (a.lines, b.lines) == ([told], [told])
    job.run(25.0)
    assert a.lines == [told]
    job.run(4.5)
    assert (a.lines, b.lines) == ([told] * 2, [told] * 2)
    job.run(250.0)
    assert len(a.lines) == 2
    job.start("c")
    assert (a.cycle, b.cycle) == (0, 0)
    job.run(60.0)
    b.is_quick = False
    a.fails()
    job.run(2.9)
    assert len(a.lines) == 2  # another round
    job.run(1.2)
    assert a.lines[2:] == ["waiting for 1 more node (2 of 3 are here: a, c; missing since cycle 0: b)"]


def test_waiting_line_names_missing_lost_and_unfit_nodes_of_the_last_cycle() -> None:
    job = Job(min_nodes=3, max_nodes=5)
    a, b, c, d, e = job.start("abcde")
    assert a.cycle == 0
    c.is_quick = False
    e.is_quick = False
    a.fails()
    job.run()
    d.dies()
    e.tell(NodeUnfit("ill"))
    job.run(3.5)
    told = (
        "waiting for 1 more node (2 of 3 are here: a, b; "
        "missing since cycle 0: c; lost in cycle 0: d; failing their health check: e)"
    )
    assert [line for line in a.lines if line.startswith("waiting")] == [told]
    assert told in b.lines
    assert c.lines == e.lines == ["node 3 (d) is lost: its launcher exited", told]
    c.ready()
    job.run(0.5)
    assert a.cycle == 0  # the last call is open for d
    job.start("d")
    job.run(1.5)
    assert a.cycle == 1


def test_a_node_that_has_no_place_stands_by_and_the_others_hear_of_it_once() -> None:
    job = Job(min_nodes=2, max_nodes=2)
    a, b = job.start("ab")
    spare, other = job.start("cd")
    job.run(1.5)
    assert spare.lines == other.lines == ["on standby for the next restart: 2 nodes run without this one", *a.lines]
    assert a.lines == ["2 nodes on standby for the next restart: c, d"]
    (late,) = job.start("e")
    job.run(30.0)
    assert late.lines == [spare.lines[0], a.lines[-1]]
    assert a.lines[1:] == ["1 node on standby for the next restart: e"]
    assert b.lines == a.lines
    b.fails()
    job.run(1.5)
    assert a.cycle == b.cycle == 1
    assert len(a.lines) == 2  # they stand by as before
    b.dies()
    job.run(2.0)
    assert spare.cycle == 2
    assert other.cycle is None


@pytest.mark.parametrize("is_gone", [True, False])
def test_nodes_that_go_on_hear_that_the_store_of_their_ranks_is_lost_with_the_launcher_of_node_0(is_gone: bool) -> None:
    job = Job(min_nodes=2, min_healthy=True)
    nodes = job.start("abc")
    if is_gone:
        nodes[0].dies()
    else:
        nodes[0].fails()
    job.run(1.0)
    (told,) = nodes[1].lines
    assert ("; the ranks' store is lost with node 0: " in told) is is_gone


def test_nodes_hear_of_one_that_is_lost_while_they_meet() -> None:
    job = Job(min_nodes=2)
    a, b, c = job.start("abc")
    b.is_quick = False
    a.fails()
    job.run(0.1)
    c.dies()
    job.run(0.5)
    lost = "node 2 (c) is lost: its launcher exited"
    assert a.lines == b.lines == [lost]
    b.leaves("stopped by SIGTERM")
    job.run()
    assert a.lines == [lost, "node 1 (b) is lost: stopped by SIGTERM"]


def test_nodes_hear_of_one_that_is_lost_before_the_verdict_which_doesn_t_list_it() -> None:
    job = Job(min_nodes=1)
    a, b, c = job.start("abc")
    a.report(NodeState.UNHEALTHY, "rank 0 lost rank 1", follows=True)
    job.run(0.1)
    for each in (b, c):
        each.leaves("stopped by SIGTERM")
    job.run(1.0)
    assert a.lines == ["node 2 (c) is lost: stopped by SIGTERM"]


def test_round_with_enough_nodes_says_how_many_more_may_join_and_until_when() -> None:
    job = Job(min_nodes=1, max_nodes=3, last_call_s=None)
    (a,) = job.start("a")
    job.run(12.0)
    assert a.lines == [
        "enough nodes to start; up to 2 more may join, for at most 19 s (--rdzv-conf last_call_timeout) (1 is here: a)"
    ]


def test_a_line_about_the_job_is_printed_by_one_launcher() -> None:
    job = Job(min_nodes=3, max_nodes=3, min_healthy=False)
    (b,) = job.start("b", rank=1)
    (a,) = job.start("a", rank=0)
    job.run(3.5)
    told = "waiting for 1 more node (2 of 3 are here: a, b)"
    assert (a.lines, b.lines) == ([told], [told])
    assert (a.printed, b.printed) == ([told], [])
    (c,) = job.start("c", rank=2)
    (spare,) = job.start("d", rank=3)
    job.run(2.5)
    assert a.printed[1:] == b.lines[1:] == c.lines == ["1 node on standby for the next restart: d"]
    assert b.printed == c.printed == []
    assert spare.printed == ["on standby for the next restart: 3 nodes run without this one"]


def test_verdict_and_lines_name_the_next_node_when_the_one_at_place_0_is_gone() -> None:
    job = Job(min_nodes=2, max_nodes=4, owner="d", min_healthy=True)
    nodes = a, b, c, d = [job.start(name, rank=rank)[0] for rank, name in enumerate("abcd")]
    assert [node.prints for node in nodes] == [True, False, False, False]
    a.dies()
    job.run(1.0)
    assert [node.prints for node in (b, c, d)] == [True, False, False]
    assert [len(node.printed) for node in (b, c, d)] == [1, 0, 0]
    assert c.lines == b.printed
    b.dies()
    c.dies()
    job.run(1.0)
    assert d.verdicts[-1].printer == d.member.identity.instance
    assert d.prints


def test_verdict_is_printed_by_a_node_of_the_cycle_though_only_a_spare_is_connected_when_it_is_reached() -> None:
    job = Job(min_nodes=1, max_nodes=1)
    a, spare = (job.start(name, rank=rank)[0] for rank, name in enumerate("ab"))
    a.fails()
    job.break_off(a, silent=True)
    job.run(0.2)
    assert spare.verdicts[-1].printer == a.member.identity.instance
