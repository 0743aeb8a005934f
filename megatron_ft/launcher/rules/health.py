"""Health check of a node by the user's command: the node takes part in no cycle until it passes. Pure."""

from __future__ import annotations

from megatron_ft.job.rules.messages import NodeUnfit
from megatron_ft.launcher.rules.effects import Write
from megatron_ft.launcher.rules.turn import Turn
from megatron_ft.link.base.wording import counted
from megatron_ft.link.facts.launcher import NodeHealth

_FIRST_S = 2.0
_LONGEST_S = 60.0
_SHOWN = 200


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
                turn.say(f"node health check passed after {counted(self.failures, 'failure')}: joining")
            return True
        self.failures += 1
        if self.failures == 1:
            turn.do(NodeUnfit(event.text))
        delay_s = retry_delay_s(self.failures)
        # ever less often, if it is like the one before
        if event.text != self._last or self.failures & (self.failures - 1) == 0:
            turn.say(f"node health check failed: {_failed(event)}; retrying in {delay_s:g} s")
        self._last, self.retry_ns = event.text, turn.now_ns + round(delay_s * 1e9)
        return False

    def take_result_while_running(self, event: NodeHealth, turn: Turn) -> None:
        """Log and report the result of a check beside ranks, which run on whatever it says."""
        turn.do(Write(event))
        before, self._while_running = self._while_running, "" if event.good else event.text
        if event.good and before:
            turn.say("node health check passed again while ranks run")
        elif not event.good and event.text != before:
            turn.say(
                f"node health check failed while ranks run: {_failed(event)}; "
                "ranks run on; the node joins no round while it fails"
            )


def _failed(event: NodeHealth) -> str:
    shown = event.last_line if len(event.last_line) <= _SHOWN else f"{event.last_line[: _SHOWN - 3]}..."
    return f"{event.text} ({shown})" if shown else event.text


def retry_delay_s(failures: int) -> float:
    """Return the seconds until the next check, after this many failures in a row."""
    return float(min(_LONGEST_S, _FIRST_S * 2.0 ** min(failures - 1, 10)))
