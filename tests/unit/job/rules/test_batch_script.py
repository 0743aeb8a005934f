"""What is done with a job of Slurm's whose batch script is gone with its host."""

from __future__ import annotations

import pytest

from megatron_ft.job.rules.batch_script import in_its_place
from megatron_ft.job.rules.lives import Ending

SHOWN = "JobId=7 JobName=x JobState={state} ReqNodeList=(null) NodeList={nodes} BatchHost=node1 NumNodes=3\n"


@pytest.mark.parametrize("ending", [ending for ending in Ending if ending is not Ending.RUNNING])
def test_job_is_requeued_if_another_life_may_follow_else_cancelled(ending: Ending) -> None:
    told = SHOWN.format(state="RUNNING", nodes="node[2-4]")
    again = ending in (Ending.STOPPED, Ending.LOST, Ending.FAILED)
    words = in_its_place(told, "7", ending, is_refused=False)
    assert words == (["scontrol", "requeue", "7"] if again else ["scancel", "7"])
    assert in_its_place(told, "7", ending, is_refused=True) == ["scancel", "7"]


@pytest.mark.parametrize(
    ("state", "nodes"),
    [("RUNNING", "node[1-4]"), ("CANCELLED", "node[2-4]"), ("COMPLETING", "node[2-4]"), ("PENDING", "")],
)
def test_job_is_left_alone_where_slurm_keeps_the_host_or_ends_the_job(state: str, nodes: str) -> None:
    told = SHOWN.format(state=state, nodes=nodes)
    assert in_its_place(told, "7", Ending.STOPPED, is_refused=False) == []
    assert in_its_place(told, "7", Ending.STOPPED, is_refused=True) == []
    assert in_its_place("", "7", Ending.STOPPED, is_refused=False) == []
