"""Objects for the user's command."""

from __future__ import annotations

import json

from megatron_ft.job.rules.lives import Ending
from megatron_ft.link.facts.launcher import Cause, CauseKind, CycleEnded, NodeLost
from megatron_ft.records.rules.notifications import EVENTS, job_ended, notification


def test_end_of_a_cycle_tells_the_cause_and_what_follows() -> None:
    cause = Cause(kind=CauseKind.CRASH, text="rank 1 exited with code 3", rank=1)
    told = notification(
        CycleEnded(cycle=4, outcome="failed", cause=cause, action="restart", restarts_left=2, ending_ns=9)
    )
    assert told is not None
    json.dumps(told)
    assert told["text"] == "cycle 4 ended: rank 1 exited with code 3 (restart)"
    assert (told["event"], told["cause"]["kind"], told["cause"]["rank"]) == ("cycle_ended", "crash", 1)
    assert told.keys() == {"event", "text", "cycle", "outcome", "cause", "action", "iteration", "restarts_left"}


def test_lost_node_is_told_with_the_reason() -> None:
    told = notification(NodeLost(cycle=2, node="n7", text="its launcher was not heard of for 12 s"))
    assert told == {
        "event": "node_lost",
        "text": "node n7 is lost: its launcher was not heard of for 12 s",
        "cycle": 2,
        "node": "n7",
    }


def test_end_of_the_job_tells_exit_code_and_cause() -> None:
    told = job_ended(Ending.NO_PROGRESS, 93, "3 cycles got no further")
    assert told["text"] == "the job has ended: no progress: 3 cycles got no further"
    assert (told["event"], told["outcome"], told["exit_code"]) == (EVENTS[1], "no_progress", 93)
