"""Which of a job's launchers prints what: its lines about the whole job, and those about its node."""

from __future__ import annotations

from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.messages import Goodbye
from megatron_ft.job.rules.restart_policy import Outcome
from megatron_ft.launcher.rules import events
from megatron_ft.link.facts.launcher import NodeHealth
from tests.support.agents import Driven, verdict

WHY = "cycle 0 ended: node 2 (c): a cable; restarting as cycle 1, 2 of 3 restarts left"
STARTED = "cycle 0 started: 6 ranks on 3 nodes, ranks 0 to 10 here"


def running(place: int, **options: object) -> Driven:
    driven = Driven(max_nodes=3, max_restarts=3, instance="me", **options)
    driven.run(nodes=3, place=place)
    return driven


def ends(driven: Driven) -> None:
    """By no fault of this node's."""
    driven.ends()
    driven.wait(10.0)
    driven.hear(events.RanksEnded())
    driven.hear(verdict(text="a cable", node=2, name="c", nodes=3))


def test_launcher_that_leaves_with_ranks_that_ended_well_says_so_itself() -> None:
    driven = running(1)
    driven.stop()
    driven.exits(0)
    driven.exits(1)
    driven.hear(events.RanksEnded())
    assert driven.said[1:] == ["cycle 0 ended: stopped by SIGTERM, all ranks exited with 0; not restarting"]
    assert driven.told[-1] == Goodbye("its launcher received SIGTERM", code=0)
    driven.hear(m.Dismiss(0))
    assert [(each.how, each.code) for each in driven.all_of(events.LauncherExit)] == [(events.Exit.STOPPED, 0)]


def test_launcher_that_takes_over_says_why_the_cycle_ended_which_the_one_before_may_not_have() -> None:
    driven = running(1)
    driven.exits(0, 3)
    here = "cycle 0: rank 0 exited with code 3"  # failed ranks are told of by the launcher of their node, too
    ends(driven)
    assert driven.said == [here]
    driven.hear(m.Tell("a spare", "other"))
    driven.hear(m.Tell("a spare", "me"))
    assert driven.said == [here, WHY, "a spare"]


def test_shared_output_has_one_line_on_why_the_job_ends() -> None:
    """It is the one at place 0, or one that is told to. A launcher that has had no place knows of no other before."""
    why = "too few"
    for place, is_told, lines in ((0, True, [STARTED, WHY, why]), (1, False, []), (1, True, [WHY, why])):
        driven = running(place, shares_output=True)
        ends(driven)
        driven.hear(m.Dismiss(94, why, True, "me" if is_told else "other"))
        assert driven.said == lines
    for is_told in (False, True):
        fresh = Driven(max_nodes=3, instance="me", shares_output=True)
        fresh.hear(events.Tick(), m.Dismiss(94, why, True, "me" if is_told else "other"))
        assert fresh.said == [why] * is_told
    everywhere = running(1, shares_output=True, says_all=True)
    ends(everywhere)
    everywhere.hear(m.Dismiss(94, why, True))
    assert everywhere.said == [STARTED, WHY, why]


def test_launcher_with_shared_output_still_says_a_reason_of_its_own() -> None:
    gone = running(1, shares_output=True)
    ends(gone)
    gone.hear(m.Dismiss(94, "no coordinator"))
    assert gone.said == ["no coordinator"]
    lost = running(1, shares_output=True)
    lost.ends(Outcome.MEMBERSHIP, lost=True, text="no message")
    lost.wait(10.0)
    lost.hear(events.RanksEnded(), m.Dismiss(94, "too few", True, "other"))  # and the job's is for another one to say
    assert [line.partition("; ")[0] for line in lost.said] == [
        "cycle 0 ended: the other nodes declared this one lost (no message) and continue without it"
    ]
    ill = Driven(max_nodes=3, checks_health=True, shares_output=True)
    ill.hear(
        events.Tick(),
        NodeHealth(cycle=0, good=False, text="exited with code 3", exit_code=3, last_line="", seconds=0.1),
        m.Dismiss(94, "", True),
    )
    assert ill.said[-1] == "its health check failed"
