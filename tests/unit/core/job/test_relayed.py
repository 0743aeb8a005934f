"""What one node asks and tells the others of a learned timeout that is over: the coordinator passes it on."""

from __future__ import annotations

from megatron_ft.core.job import messages as m
from tests.support.machines import Job, Launcher


def three() -> tuple[Job, list[Launcher]]:
    job = Job(min_nodes=3)
    launchers = job.start("abc")
    job.run(0.5)
    assert [launcher.cycle for launcher in launchers] == [0, 0, 0]
    return job, launchers


def test_a_question_and_its_answer_reach_all_the_others_and_nobody_else() -> None:
    job, (a, b, c) = three()
    b.do(b.member.tell(m.Suspected(0, 1.0), job.now_s))
    job.run()
    assert (a.relayed, b.relayed, c.relayed) == ([m.Suspected(0, 1.0)], [], [m.Suspected(0, 1.0)])
    moving = m.RankProgressing(0, "rank 0 has begun an iteration")
    a.do(a.member.tell(moving, job.now_s))
    job.run()
    assert a.relayed == [m.Suspected(0, 1.0)]
    assert b.relayed == [moving]
    assert c.relayed == [m.Suspected(0, 1.0), moving]


def test_question_that_all_nodes_ask_at_once_is_relayed_only_once() -> None:
    job, launchers = three()
    for launcher in launchers:
        launcher.do(launcher.member.tell(m.Suspected(0, 1.0), job.now_s))
    job.run()
    assert sum(len(launcher.relayed) for launcher in launchers) == 2


def test_node_that_has_ended_its_ranks_gets_no_relayed_question() -> None:
    job, (a, b, _) = three()
    a.fails()
    job.run(0.1)
    b.do(b.member.tell(m.Suspected(0, 1.0), job.now_s))
    job.run()
    assert a.relayed == []
