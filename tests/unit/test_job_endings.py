"""How a job ends, and what a node hears that leaves it or is left out: codes and words, by the machines themselves."""

from __future__ import annotations

from megatron_ft.core.restart_policy import Outcome
from tests.support.machines import Job


def test_the_node_that_hosts_the_coordinator_is_the_first_whoever_came_before() -> None:
    job = Job(owner="c", max_nodes=3)
    nodes = job.start("abc")
    assert [node.member.place for node in nodes] == [1, 2, 0]


def test_a_spare_that_does_not_answer_holds_nobody_up() -> None:
    job = Job(min_nodes=2, max_nodes=2)
    a, b, spare = job.start("abc")
    job.run(0.5)
    spare.is_silent = True
    for node in (a, b):
        node.finishes()
    job.run(0.1)
    assert a.left == b.left == (0, "")
    assert not job.has_quit
    spare.is_silent = False
    job.run(15.0)
    assert job.has_quit


def test_a_job_that_has_finished_on_some_nodes_says_so() -> None:
    job = Job(min_nodes=2, min_healthy=True)
    nodes = job.start("abc")
    nodes[1].fails()
    nodes[0].finishes()
    nodes[2].finishes()
    job.run(0.1)
    told = "the job finished on 2 of 3 nodes: node 1 (b) is unhealthy: rank 0 exited with code 7"
    assert [node.left for node in nodes] == [(0, told)] * 3
    assert [(node.ends[0].outcome, node.ends[0].text) for node in nodes] == [(Outcome.SUCCEEDED, told)] * 3


def test_one_of_two_nodes_that_are_left_may_be_lost_soon_after_another() -> None:
    job = Job(min_nodes=1)
    a, b, c = job.start("abc")
    c.dies()
    job.run(0.7)
    b.dies()
    job.run(3.0)
    assert (a.cycle, a.begun and a.begun.decision.world) == (1, 1)


def test_a_node_that_was_taken_for_lost_hears_why() -> None:
    job = Job(min_nodes=2)
    nodes = job.start("abc")
    nodes[2].is_silent = True
    job.run(6.5)
    nodes[2].is_silent = False
    job.run(0.5)
    (end,) = nodes[2].ends
    assert (end.lost, end.text) == (True, "its launcher was not heard of for 6 s")
    nodes[1].is_silent = True  # and one that has slept through more than that
    job.run(9.0)
    nodes[1].is_silent = False
    job.run(3.0)
    assert (nodes[1].ends[-1].lost, nodes[1].ends[-1].text) == (True, "cycle 2 runs without it")
