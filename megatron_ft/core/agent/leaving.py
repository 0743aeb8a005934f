"""Why this launcher leaves the job before its end, what it tells the others then, and how it ends. Pure."""

from __future__ import annotations

import signal

from megatron_ft.core.agent import lines
from megatron_ft.core.agent.edge import Exit, Over, StopAsked
from megatron_ft.core.agent.turn import Options
from megatron_ft.core.diagnosis.exits import Cause
from megatron_ft.core.job.edge import Leave
from megatron_ft.core.job.messages import Goodbye, Verdict
from megatron_ft.core.job.restart_policy import Action, RestartDecision

__all__ = ["Leaving", "stopped"]

_GOODBYE_S = 1.0
"""How long to wait, in seconds, until the others have received why this node leaves."""
_EXCLUDED_S = 30.0
"""The same if the launcher stays anyway: it waits for a coordinator that takes over, and sends it the message."""


class Leaving:
    """Of one launcher."""

    def __init__(self, options: Options) -> None:
        self.signals: list[signal.Signals] = []
        """They have asked it to stop."""
        self.hurry: signal.Signals | None = None
        """The one that asked a second time."""
        self.abandoned = ""
        """Why it can't go on where it is, in words; empty if it can."""
        self.goodbye: Goodbye | None = None
        self.cause: Cause | None = None
        """Why its node is left out."""
        self._stuck = ""
        self._options = options

    def asked(self, event: StopAsked) -> None:
        """A signal."""
        self.signals.append(event.number)
        if event.again:
            self.hurry = self.hurry or event.number

    def abandon(self, text: str) -> None:
        """It can't go on where it is, for that reason."""
        self.abandoned = text

    @property
    def is_due(self) -> bool:
        """Whether it leaves of its own accord."""
        return bool(self.signals or self.abandoned)

    @property
    def is_excluded(self) -> bool:
        """Whether it has told the others that its node is left out."""
        return self.goodbye is not None and self.goodbye.excluded

    @property
    def within_s(self) -> float:
        """So long an answer to its goodbye is waited for."""
        return _EXCLUDED_S if self.is_excluded else _GOODBYE_S

    def take_leave(self, *, well: bool) -> Goodbye:
        """Leave; returns what to tell the others. ``well``: no rank of this node has ended otherwise than with 0."""
        if self.signals:
            self.goodbye = Goodbye(f"its launcher received {self.signals[0].name}", well=well)
        else:
            self.goodbye = Goodbye(self.abandoned, failed=True)
        return self.goodbye

    def leave_out(self, cause: Cause, stuck: str) -> Goodbye:
        """The same where a rank asked for this node to be left out, or processes (in words) can't be killed."""
        self.cause, self._stuck = cause, stuck
        self.goodbye = Goodbye(f"{stuck} can't be killed" if stuck else cause.text, excluded=True)
        return self.goodbye

    def over(self) -> Over:
        """How it ends for a launcher that leaves of its own accord."""
        assert self.goodbye is not None
        if self.signals:
            return stopped(self.signals[0], self.goodbye.well)
        return Over(Exit.ABANDONED, self._options.try_again_code, self.abandoned)

    def over_excluded(self, left: Leave, verdict: Verdict | None) -> tuple[Over, str]:
        """The same where its node is left out and the launcher doesn't stay, with the line for the user."""
        if self._stuck and self._options.max_nodes == 1:
            return Over(Exit.FAILED, 1, verdict=verdict), ""
        # 0: a scheduler that ends the whole job when one node's task fails would undo what was asked for
        return Over(Exit.EXCLUDED, 1 if self._job_ends(left) else 0, left.text), left.text if self._stuck else ""

    def decision(self, left: Leave, *, restarts_left: int) -> RestartDecision:
        """What is done where its node is left out; ``left`` says whether the others can go on."""
        stuck = self._stuck
        reason = f"{stuck} can't be killed, this node leaves the job" if stuck else "this node leaves the job"
        if stuck and self._options.max_nodes == 1:
            reason = f"{stuck} can't be killed, giving up"
        elif not stuck and self._job_ends(left):
            reason = f"{reason}, which ends: {left.text}"
        return RestartDecision(action=Action.GIVE_UP, restarts_left=restarts_left, reason=reason)

    def _job_ends(self, left: Leave) -> bool:
        options = self._options
        if options.meets_elsewhere:  # whose other nodes this launcher doesn't know
            return options.min_nodes == options.max_nodes
        return left.code != 0


def stopped(number: int, well: bool) -> Over:
    """How it ends for a launcher that was asked to stop; ``well``: all its ranks have ended with 0."""
    text = lines.stopped(signal.Signals(number).name, [] if well else ["not all ranks exited with 0"])
    return Over(Exit.STOPPED, 128 + number if number == signal.SIGINT else 0 if well else 1, text)
