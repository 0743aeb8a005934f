"""When the nodes that are ready begin a cycle, and when they wait for more. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ft.core.job.messages import Rules

__all__ = ["RoundCompletion", "last_call_s"]

_FIRST_CALL_S = 30.0
_LAST_CALL_S = 1.0


def last_call_s(rules: Rules, *, is_first: bool) -> float:
    """So long a round is open for more nodes once there are enough; ``is_first``: the job hasn't had a cycle."""
    if rules.last_call_s is not None:
        return rules.last_call_s
    return _FIRST_CALL_S if is_first else _LAST_CALL_S


@dataclass(slots=True)
class RoundCompletion:
    """One per coordinator, for all rounds. Times are seconds of the coordinator's own clock.

    Args:
        alarm_s: when to ask again at the latest.
        waits_s: since when there have been too few.
    """

    alarm_s: float | None = None
    waits_s: float | None = None
    _seen: tuple[int, int] = (0, 0)
    _settled_s: float = 0.0

    def update(
        self, rules: Rules, *, ready: int, awaited: bool, last: int, patient: bool, arrivals: int, now_s: float
    ) -> bool:
        """Take note of how the nodes are now; returns whether those that are ready begin a cycle.

        ``awaited``: nodes of the last cycle, which had ``last`` (0: there was none), are alive and not ready yet;
        ``arrivals`` counts the launchers that ever came; ``patient``: the last cycle ended because nodes left or
        joined, so more may come.
        """
        self.alarm_s = None
        if ready >= rules.min_nodes:
            self.waits_s = None
        elif self.waits_s is None:
            self.waits_s = now_s
        if self._seen != (min(ready, rules.min_nodes), arrivals if last else 0) or awaited:
            self._seen, self._settled_s = (min(ready, rules.min_nodes), arrivals if last else 0), now_s
        if ready < rules.min_nodes:
            self.alarm_s = (self.waits_s or now_s) + rules.join_timeout_s
            return False
        if awaited:
            return False
        if ready >= rules.max_nodes or (0 < last <= ready and rules.last_call_s is None and not patient):
            return True
        self.alarm_s = self._settled_s + last_call_s(rules, is_first=last == 0)
        return now_s >= self.alarm_s

    def has_waited_long(self, rules: Rules, now_s: float) -> bool:
        """Whether nodes that are needed haven't come in the time in which a round must be met."""
        return self.waits_s is not None and now_s >= self.waits_s + rules.join_timeout_s
