"""Health check of a node by the user's command: the node takes part in no cycle until it passes. Pure."""

from __future__ import annotations

from megatron_ft.core.agent import cycle_lines
from megatron_ft.core.agent.effects import Write
from megatron_ft.core.agent.turn import Turn
from megatron_ft.core.facts.launcher import NodeHealth
from megatron_ft.job.rules.actions import Say
from megatron_ft.job.rules.messages import NodeUnfit

_FIRST_S = 2.0
_LONGEST_S = 60.0


class HealthGate:
    """Checks of this node between two cycles."""

    def __init__(self) -> None:
        self.retry_ns = 0
        """Time of the next check."""
        self.failures = 0
        self._last = ""
        self._while_running = ""
        """How the last check beside ranks failed; empty if it did not."""

    def take_result(self, event: NodeHealth, turn: Turn) -> bool:
        """Log and report the result of a check. Return True if the node is fit."""
        turn.do(Write(event))
        if event.good:
            if self.failures:
                turn.do(Say(cycle_lines.fit_again(self.failures)))
            return True
        self.failures += 1
        if self.failures == 1:
            turn.do(NodeUnfit(event.text))
        delay_s = retry_delay_s(self.failures)
        # ever less often, if it is like the one before
        if event.text != self._last or self.failures & (self.failures - 1) == 0:
            turn.do(Say(cycle_lines.unfit(event.text, event.last_line, retry_s=delay_s)))
        self._last, self.retry_ns = event.text, turn.now_ns + round(delay_s * 1e9)
        return False

    def take_result_while_running(self, event: NodeHealth, turn: Turn) -> None:
        """Log and report the result of a check beside ranks, which run on whatever it says."""
        turn.do(Write(event))
        before, self._while_running = self._while_running, "" if event.good else event.text
        if event.good:
            if before:
                turn.do(Say(cycle_lines.fit_while_running()))
        elif event.text != before:
            turn.do(Say(cycle_lines.unfit_while_running(event.text, event.last_line)))


def retry_delay_s(failures: int) -> float:
    """Return the seconds until the next check, after this many failures in a row."""
    return float(min(_LONGEST_S, _FIRST_S * 2.0 ** min(failures - 1, 10)))
