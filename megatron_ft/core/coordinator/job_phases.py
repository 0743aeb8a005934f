"""Phases of a job at its coordinator as a table. `docs/design/control-plane.md` has the same table. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ft.core import state_table


class CoordinatorPhase(enum.Enum):
    """Phase of the job, as its coordinator knows it."""

    MEETING = "meeting"
    """No cycle has begun."""
    RUNNING = "running"
    JUDGING = "judging"
    """The cycle is over, and why isn't known yet."""
    RESTARTING = "restarting"
    """Another cycle follows, once its nodes have met."""
    ENDING = "ending"
    """No cycle follows; the end of the job isn't decided yet."""
    OVER = "over"


class CoordinatorMove(enum.Enum):
    """Events that move the job from one phase to the next; the values appear in `docs/design/control-plane.md`."""

    CYCLE = "a cycle is decided, here or at another coordinator"
    ENDED = "the outcome of the cycle is known"
    RESTART = "the verdict: another cycle follows"
    NO_RESTART = "the verdict: none follows, or the end of the job was requested before"
    REQUEST = "the end of the job is requested"
    END = "`end` is decided"


_P, _M = CoordinatorPhase, CoordinatorMove
TRANSITIONS: Mapping[tuple[CoordinatorPhase, CoordinatorMove], CoordinatorPhase] = {
    (_P.MEETING, _M.CYCLE): _P.RUNNING,
    (_P.MEETING, _M.END): _P.OVER,
    (_P.RUNNING, _M.ENDED): _P.JUDGING,
    (_P.RUNNING, _M.CYCLE): _P.RUNNING,
    (_P.RUNNING, _M.END): _P.OVER,
    (_P.RUNNING, _M.REQUEST): _P.RUNNING,  # noted; it counts once the cycle is over
    (_P.RUNNING, _M.RESTART): _P.RUNNING,  # a verdict may be told before the outcome
    (_P.RUNNING, _M.NO_RESTART): _P.RUNNING,
    (_P.JUDGING, _M.REQUEST): _P.JUDGING,
    (_P.JUDGING, _M.RESTART): _P.RESTARTING,
    (_P.JUDGING, _M.NO_RESTART): _P.ENDING,
    (_P.JUDGING, _M.CYCLE): _P.RUNNING,
    (_P.JUDGING, _M.END): _P.OVER,
    (_P.RESTARTING, _M.CYCLE): _P.RUNNING,
    (_P.RESTARTING, _M.REQUEST): _P.ENDING,
    (_P.RESTARTING, _M.END): _P.OVER,
    (_P.ENDING, _M.CYCLE): _P.RUNNING,
    (_P.ENDING, _M.END): _P.OVER,
    (_P.ENDING, _M.REQUEST): _P.ENDING,
}
state_table.check(TRANSITIONS, first=_P.MEETING, last=_P.OVER)


@dataclass(slots=True)
class JobState:
    """The phase of one job."""

    phase: CoordinatorPhase = CoordinatorPhase.MEETING

    def move(self, event: CoordinatorMove) -> None:
        """Enter the phase that the table names."""
        self.phase = state_table.follow(TRANSITIONS, self.phase, event)

    @property
    def is_running(self) -> bool:
        return self.phase is CoordinatorPhase.RUNNING

    @property
    def is_over(self) -> bool:
        return self.phase is CoordinatorPhase.OVER

    @property
    def gathers(self) -> bool:
        """True while the nodes that are ready may begin a cycle."""
        return self.phase in (CoordinatorPhase.MEETING, CoordinatorPhase.RESTARTING)
