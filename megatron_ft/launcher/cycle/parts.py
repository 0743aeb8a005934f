"""The parts of a launcher. To leave one out, delete its line here, and that in the list of the leader (`job.parts`)."""

from __future__ import annotations

from megatron_ft.diagnosis.launcher.collective_watch import CollectiveWatch
from megatron_ft.diagnosis.launcher.deadlines import Deadlines
from megatron_ft.diagnosis.launcher.hangs_on_node import HangsOnNode
from megatron_ft.diagnosis.launcher.last_look import LastLook
from megatron_ft.diagnosis.launcher.slow_ranks_on_node import SlowRanksOnNode
from megatron_ft.launcher.rules.turn import Options
from megatron_ft.learning.launcher.part import LauncherLearning
from megatron_ft.link.base.launcher_part import LauncherPart
from megatron_ft.link.base.pauses import Pauses
from megatron_ft.memory.launcher.snapshots_on_node import SnapshotsOnNode
from megatron_ft.memory.rules.snapshots import Kept


def launcher_parts(options: Options, pauses: Pauses, found: Kept) -> list[LauncherPart]:
    """Return the parts. ``found``: snapshots that this node can restore at first."""
    learns = LauncherLearning(options.given)
    deadlines = Deadlines(options, learns.configured, pauses)
    hangs = HangsOnNode(options, learns)
    return [
        learns,
        deadlines,
        LastLook(options, deadlines),
        CollectiveWatch(options, pauses, hangs, deadlines),
        hangs,
        SlowRanksOnNode(options),
        SnapshotsOnNode(found),
    ]
