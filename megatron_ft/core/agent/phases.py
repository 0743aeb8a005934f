"""The agent's phases as a table: (phase, what happens) -> next phase. `docs/design/agent.md` has it, too. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from megatron_ft.core import state_table
from megatron_ft.core.agent.turn import AgentPhase


class PhaseEvent(enum.Enum):
    """Events that move the agent from one phase to the next; the values appear in `docs/design/agent.md`."""

    CHECK_DUE = "the health command is due"
    FIT = "the node is fit, or there is no health command"
    UNFIT = "the health command failed"
    BEGIN = "`Begin`"
    STARTED = "`RanksStarted`"
    NOT_STARTED = "`NotStarted`: the cycle is over, or the nodes can't meet"
    START_GIVEN_UP = "`NotStarted`: the launcher was asked to stop"
    CYCLE_ENDS = "the cycle ends, a signal comes, or a rank asks to exclude the node"
    RANKS_DUE = "ranks have ended, or their time is over"
    RANKS_ENDED = "`RanksEnded`"
    RESTART = "another cycle follows"
    NO_RESTART = "no cycle follows, as far as is known"
    GOODBYE = "the node leaves the job"
    LEFT_OUT = "`LeftOut`"
    OVER = "`Leave`, or no answer to the goodbye"


_P, _E = AgentPhase, PhaseEvent
TRANSITIONS: Mapping[tuple[AgentPhase, PhaseEvent], AgentPhase] = {
    (_P.JOINING, _E.CHECK_DUE): _P.CHECKING,
    (_P.JOINING, _E.FIT): _P.READY,
    (_P.JOINING, _E.GOODBYE): _P.LEAVING,
    (_P.JOINING, _E.OVER): _P.OVER,
    (_P.CHECKING, _E.FIT): _P.READY,
    (_P.CHECKING, _E.UNFIT): _P.ASIDE,
    (_P.CHECKING, _E.GOODBYE): _P.LEAVING,
    (_P.CHECKING, _E.OVER): _P.OVER,
    (_P.ASIDE, _E.CHECK_DUE): _P.CHECKING,
    (_P.ASIDE, _E.GOODBYE): _P.LEAVING,
    (_P.ASIDE, _E.OVER): _P.OVER,
    (_P.READY, _E.BEGIN): _P.STARTING,
    (_P.READY, _E.GOODBYE): _P.LEAVING,
    (_P.READY, _E.OVER): _P.OVER,
    (_P.STARTING, _E.STARTED): _P.RUNNING,
    (_P.STARTING, _E.NOT_STARTED): _P.RUNNING,
    (_P.STARTING, _E.START_GIVEN_UP): _P.JOINING,
    (_P.RUNNING, _E.CYCLE_ENDS): _P.ENDING,
    (_P.ENDING, _E.RANKS_DUE): _P.TERMINATING,
    (_P.TERMINATING, _E.RANKS_ENDED): _P.JUDGING,
    (_P.JUDGING, _E.RESTART): _P.JOINING,
    (_P.JUDGING, _E.NO_RESTART): _P.DONE,
    (_P.JUDGING, _E.GOODBYE): _P.LEAVING,
    (_P.DONE, _E.RESTART): _P.JOINING,
    (_P.DONE, _E.NO_RESTART): _P.DONE,
    (_P.DONE, _E.GOODBYE): _P.LEAVING,
    (_P.DONE, _E.OVER): _P.OVER,
    (_P.LEAVING, _E.GOODBYE): _P.LEAVING,
    (_P.LEAVING, _E.LEFT_OUT): _P.EXCLUDED,
    (_P.LEAVING, _E.OVER): _P.OVER,
    (_P.EXCLUDED, _E.GOODBYE): _P.LEAVING,
    (_P.EXCLUDED, _E.OVER): _P.OVER,
}
state_table.check(TRANSITIONS, first=_P.JOINING, last=_P.OVER)
