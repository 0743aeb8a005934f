"""The parts of a leader. To leave one out, delete its line here, and that in the list of the launcher."""

from __future__ import annotations

import functools
import operator
from typing import Any

from megatron_ft.diagnosis.leader_parts import HangsAtLeader
from megatron_ft.diagnosis.slow_ranks import SlowRanksAtLeader
from megatron_ft.learning.gathering import LearningAtLeader
from megatron_ft.memory.leader.snapshots_part import SnapshotsAtLeader

LEADER_PARTS = (HangsAtLeader, SnapshotsAtLeader, LearningAtLeader, SlowRanksAtLeader)
HEARD_BY_PARTS: Any = functools.reduce(operator.or_, (part.HEARS for part in LEADER_PARTS))
SAID_BY_PARTS: Any = functools.reduce(operator.or_, (part.SAYS for part in LEADER_PARTS))
"""Messages of launchers' parts, and to them."""
