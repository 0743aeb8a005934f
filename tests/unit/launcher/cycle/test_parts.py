"""A launcher whose machine lacks one of its parts runs, restarts and ends a job all the same."""

from __future__ import annotations

import pytest

from megatron_ft.config.config import ConfigValues
from megatron_ft.diagnosis.launcher.slow_ranks_on_node import SlowRanksOnNode
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.restart_policy import Action, Outcome
from megatron_ft.launcher.cycle.parts import launcher_parts
from megatron_ft.launcher.rules import events
from megatron_ft.launcher.rules.agent import Agent
from megatron_ft.launcher.rules.events import Exit
from megatron_ft.launcher.rules.turn import Options
from megatron_ft.learning.launcher.part import LauncherLearning
from megatron_ft.link.base.launcher_part import LauncherPart
from megatron_ft.link.base.pauses import Pauses
from megatron_ft.memory.launcher.snapshots_on_node import SnapshotsOnNode
from megatron_ft.memory.rules.snapshots import Kept
from tests.support.agents import Driven, verdict


@pytest.mark.parametrize("left_out", [SlowRanksOnNode, SnapshotsOnNode, LauncherLearning])
def test_job_is_restarted_and_finished_without_the_part(left_out: type[LauncherPart]) -> None:
    driven, options = Driven(), Options(given=ConfigValues(), max_restarts=1)
    parts = launcher_parts(options, Pauses(), Kept())
    driven.agent = Agent(options, [part for part in parts if not isinstance(part, left_out)])
    driven.run()
    driven.exits(0, 7)
    driven.ends()
    driven.hear(events.RanksEnded(), verdict(node=0, rank=0))
    driven.run(cycle=1, restarts=1)
    driven.exits(0)
    driven.exits(1)
    driven.ends(Outcome.SUCCEEDED, restarts=False)
    driven.hear(events.RanksEnded(), verdict(1, Outcome.SUCCEEDED, Action.FINISH), m.Dismiss(0))
    (over,) = driven.all_of(events.LauncherExit)
    assert (over.how, driven.agent.part(left_out)) == (Exit.SUCCEEDED, None)
