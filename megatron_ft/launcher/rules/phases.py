"""The agent's phases as a table: (phase, what happens) -> next phase. `docs/design/agent.md` has it, too. Pure."""

from __future__ import annotations

import enum

from megatron_ft.link.base import state_table
from megatron_ft.records.rules.metrics import NodeActivity


class AgentPhase(enum.Enum):
    """Phase of the launcher; ``activity``: as metrics show it."""

    def __init__(self, _name: str, activity: NodeActivity) -> None:
        self.activity = activity

    JOINING = "joining", NodeActivity.WAITING
    CHECKING = "checking", NodeActivity.WAITING
    """The health command runs."""
    ASIDE = "aside", NodeActivity.UNFIT
    READY = "ready", NodeActivity.WAITING
    STARTING = "starting", NodeActivity.WAITING
    RUNNING = "running", NodeActivity.TRAINING
    ENDING = "ending", NodeActivity.ENDING
    """Ranks are given time to end by themselves."""
    TERMINATING = "terminating", NodeActivity.ENDING
    JUDGING = "judging", NodeActivity.ENDING
    """Why the cycle has ended isn't known yet."""
    DONE = "done", NodeActivity.ENDED
    """No rank is left, and not all nodes know yet how the job has ended."""
    LEAVING = "leaving", NodeActivity.LEAVING
    """The node has said goodbye, and waits until the others have received it."""
    EXCLUDED = "excluded", NodeActivity.LEAVING
    """The others go on without this node; the launcher waits for the end of the job."""
    OVER = "over", NodeActivity.ENDED


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
_LEAVES = {_E.GOODBYE: _P.LEAVING, _E.OVER: _P.OVER}
TRANSITIONS = {
    (phase, event): after
    for phase, row in {
        _P.JOINING: {_E.CHECK_DUE: _P.CHECKING, _E.FIT: _P.READY, **_LEAVES},
        _P.CHECKING: {_E.FIT: _P.READY, _E.UNFIT: _P.ASIDE, **_LEAVES},
        _P.ASIDE: {_E.CHECK_DUE: _P.CHECKING, **_LEAVES},
        _P.READY: {_E.BEGIN: _P.STARTING, **_LEAVES},
        _P.STARTING: {_E.STARTED: _P.RUNNING, _E.NOT_STARTED: _P.RUNNING, _E.START_GIVEN_UP: _P.JOINING},
        _P.RUNNING: {_E.CYCLE_ENDS: _P.ENDING},
        _P.ENDING: {_E.RANKS_DUE: _P.TERMINATING},
        _P.TERMINATING: {_E.RANKS_ENDED: _P.JUDGING},
        _P.JUDGING: {_E.RESTART: _P.JOINING, _E.NO_RESTART: _P.DONE, _E.GOODBYE: _P.LEAVING},
        _P.DONE: {_E.RESTART: _P.JOINING, _E.NO_RESTART: _P.DONE, **_LEAVES},
        _P.LEAVING: {_E.GOODBYE: _P.LEAVING, _E.LEFT_OUT: _P.EXCLUDED, _E.OVER: _P.OVER},
        _P.EXCLUDED: _LEAVES,
    }.items()
    for event, after in row.items()
}
state_table.check(TRANSITIONS, first=_P.JOINING, last=_P.OVER)
