"""Rules for learned timeouts on made-up jobs: how often each ends a healthy rank, and how late it would see a hang.

Nothing is judged before the first save. A step that a kill cut short is repeated only if it takes as long again for a
reason (an evaluation, the end of the data), and five times at most; where it isn't, the job goes on behind it. Both
spare the rule that kills more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatron_ft.core.agent.suspicion import CHECK_S
from megatron_ft.core.board.intervals import FIRST_INTERVALS
from megatron_ft.core.timeouts.budget_rule import (
    BUDGET,
    after_kill,
    after_update,
    begin_cycle,
    learn,
)
from megatron_ft.core.timeouts.known import Known
from megatron_ft.core.timeouts.reference_rule import calculate_timeout
from megatron_ft.core.timeouts.sketch import NO_INTERVAL, Sketch, bounded, merge
from megatron_ft.core.timeouts.tail import bucket_of
from tests.bench.figures import Row
from tests.bench.recorded import recorded
from tests.bench.traces import TRACES, Flags, Floats, Trace, make, slow_first

__all__ = ["Budget", "Constant", "Outcome", "Reference", "Rule", "measure", "play", "rows"]

SAVE_EVERY = 250
FACTOR = 5.0
_MOST_REPEATS = 5
_FACTORS = (5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 15.0, 20.0, 30.0, 50.0, 100.0)
_NONE = float("inf")


class Rule(Protocol):
    """What learns in a job. Times are seconds."""

    timeout_s: float
    first_s: float
    """Of the first steps of a run."""
    limit_s: float
    """Of a step in which ranks are seen to make progress."""

    def restart(self) -> None:
        """A run begins: the processes are new."""

    def killed(self) -> None:
        """The timeout has ended the last run."""

    def saw(self, took_s: Floats, of_run: int, told: Flags) -> None:
        """Steps of all ranks, the first of which so many of its run precede; which are told from a hang."""

    def update(self) -> None:
        """All ranks save."""


class Reference:
    """A factor times the longest of this run; the mean of that and the last timeout."""

    def __init__(self, factor: float = FACTOR) -> None:
        self.timeout_s = self.first_s = self.limit_s = _NONE
        self._factor = factor
        self._longest_s = 0.0

    def restart(self) -> None:
        self._longest_s = 0.0

    def killed(self) -> None:
        self.restart()

    def saw(self, took_s: Floats, of_run: int, told: Flags) -> None:
        self._longest_s = max(self._longest_s, float(took_s.max()))

    def update(self) -> None:
        known = self.timeout_s != _NONE
        self.timeout_s = self.first_s = self.limit_s = calculate_timeout(
            longest=self._longest_s,
            safety_factor=self._factor,
            current=self.timeout_s if known else None,
            current_was_calculated=known,
            floor=0.0,
        )


class Budget:
    """Ours, with the sketches that monitors make and the coordinator merges."""

    def __init__(self) -> None:
        self.timeout_s = self.first_s = self.limit_s = _NONE
        self._known = Known()
        self.restart()

    def restart(self) -> None:
        self._known = begin_cycle(self._known)
        self._ranks: list[Monitor] = []
        self._enforce(Sketch())

    def killed(self) -> None:
        self._known = after_kill(self._known)
        self.restart()

    def saw(self, took_s: Floats, of_run: int, told: Flags) -> None:
        self._ranks = self._ranks or [Monitor() for _ in range(took_s.shape[1])]
        is_first = np.arange(of_run, of_run + len(took_s)) < FIRST_INTERVALS
        suspect_s = np.where(is_first, self.first_s, self.timeout_s)
        for rank, monitor in enumerate(self._ranks):
            monitor.saw(took_s[:, rank], is_first, told & (took_s[:, rank] > suspect_s))

    def update(self) -> None:
        sketch = merge(monitor.sketch() for monitor in self._ranks)
        self._known = after_update(self._known, sketch, factor=FACTOR)
        self._enforce(sketch)

    def _enforce(self, sketch: Sketch) -> None:
        found = learn(self._known, sketch, factor=FACTOR, rule=BUDGET, cap_s=None, previous_s=None)
        if found is not None:
            self.timeout_s, self.first_s, self.limit_s = found.timeout_s, found.first_s, found.limit_s


class Monitor:
    """What the monitor of one rank has seen in this cycle."""

    def __init__(self) -> None:
        self._ended = 0
        self._longest_s = self._first_s = self._explained_s = NO_INTERVAL
        self._counts: dict[int, float] = {}

    def saw(self, took_s: Floats, is_first: Flags, is_explained: Flags) -> None:
        self._ended += len(took_s)
        self._longest_s = float(took_s.max(initial=self._longest_s))
        self._first_s = float(took_s[is_first].max(initial=self._first_s))
        self._explained_s = float(took_s[is_explained].max(initial=self._explained_s))
        values, counts = np.unique(took_s[~(is_first | is_explained)].round(3), return_counts=True)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            bucket = bucket_of(value)
            self._counts[bucket] = self._counts.get(bucket, 0.0) + count

    def sketch(self) -> Sketch:
        return Sketch(
            ended=self._ended,
            longest_s=self._longest_s,
            first_s=self._first_s,
            explained_s=self._explained_s,
            tail=bounded(self._counts),
        )


class Constant(Reference):
    """What somebody might have chosen who knew all that was to come."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._chosen_s = timeout_s

    def update(self) -> None:
        self.timeout_s = self.first_s = self.limit_s = self._chosen_s


@dataclass(frozen=True)
class Outcome:
    """``delay_s`` is the mean of the timeout, which is how long a hang lasts before anybody looks."""

    steps: int
    kills: int
    delay_s: float

    @property
    def per_million(self) -> float:
        """False kills in a million steps of the job."""
        return 1e6 * self.kills / self.steps


def play(trace: Trace, rule: Rule, *, looks: bool = False) -> Outcome:
    """A job under a rule.

    ``looks``: a rank that is suspected is ended `CHECK_S` later, unless its step is told from a hang (`Trace.told`):
    then it is ended at the limit.
    """
    steps = len(trace.took_s)
    begins = np.flatnonzero(trace.begins)
    told = trace.told if looks else np.zeros(steps, dtype=np.bool_)
    at = of_run = kills = tries = judged = 0
    delay = 0.0
    while at < steps:
        if trace.begins[at] and not tries:
            rule.restart()
            of_run = 0
        later = begins[np.searchsorted(begins, at, side="right") :]
        end = min([at + SAVE_EVERY - of_run % SAVE_EVERY, steps, *later[:1].tolist()])
        took = trace.took_s[at:end].copy()
        numbers = np.arange(of_run, of_run + len(took))
        took *= np.array([slow_first(int(n)) for n in numbers[:8]] + [1.0] * (len(took) - 8))[: len(took), None]
        suspect_s = np.where(numbers < FIRST_INTERVALS, rule.first_s, rule.timeout_s)
        late = np.flatnonzero(took.max(axis=1) > np.where(told[at:end], rule.limit_s, suspect_s))
        done = int(late[0]) if len(late) else len(took)
        if rule.timeout_s != _NONE:
            delay, judged = delay + (rule.timeout_s + (CHECK_S if looks else 0.0)) * done, judged + done
        if done:
            rule.saw(took[:done], of_run, told[at : at + done])
        at += done
        if not len(late):
            of_run += done
            tries = 0
            if of_run % SAVE_EVERY == 0:
                rule.update()
            continue
        kills += 1
        tries = tries + 1 if not done else 1
        if not trace.repeats[at] or tries >= _MOST_REPEATS:
            at, tries = at + 1, 0
        rule.killed()
        # it goes on from the last save, slowly at first, and comes here later
        first = np.array([[slow_first(n)] * took.shape[1] for n in range(FIRST_INTERVALS)])
        rule.saw(np.median(took) * first, 0, np.zeros(FIRST_INTERVALS, dtype=np.bool_))
        of_run = FIRST_INTERVALS
    return Outcome(steps, kills, delay / max(judged, 1))


def measure(seeds: int, intervals: int) -> dict[str, Any]:
    """Sums over the seeds; ``intervals`` are those of all ranks of one job. The recorded jobs are what they are."""
    made = {name: _measure([make(name, seed, intervals) for seed in range(seeds)]) for name in TRACES}
    return {**made, **{f"recorded, {each.name}": _measure([each]) for each in recorded()}}


def _measure(traces: list[Trace]) -> dict[str, float]:
    def over_all(rule: Callable[[], Rule], *, looks: bool = False) -> Outcome:
        found = [play(trace, rule(), looks=looks) for trace in traces]
        return Outcome(sum(f.steps for f in found), sum(f.kills for f in found), _mean([f.delay_s for f in found]))

    ours, reference, looked = over_all(Budget), over_all(Reference), over_all(Budget, looks=True)
    same = reference
    for factor in _FACTORS:
        same = over_all(lambda factor=factor: Reference(factor))  # type: ignore[misc]
        if same.delay_s >= looked.delay_s:
            break
    best = over_all(lambda: Constant(looked.delay_s))
    return {
        "ours": ours.per_million,
        "ours_s": ours.delay_s,
        "looked": looked.per_million,
        "looked_s": looked.delay_s,
        "reference": reference.per_million,
        "reference_s": reference.delay_s,
        "as_slow": same.per_million,
        "as_slow_s": same.delay_s,
        "as_slow_factor": factor,
        "constant": best.per_million,
    }


def rows(result: dict[str, Any]) -> list[Row]:
    """Of each trace."""
    found = []
    for name, of in result.items():
        found += [
            Row(f"{name}: false kills per million steps", "", of["looked"], {"reference": of["reference"]}),
            Row(f"{name}: until a hang is ended", "s", of["looked_s"], {"reference": of["reference_s"]}),
            Row(
                f"{name}: false kills, factor {of['as_slow_factor']:g} ({of['as_slow_s']:.3g} s)",
                "",
                of["looked"],
                {"reference": of["as_slow"]},
            ),
            Row(f"{name}: false kills of the best constant that is as slow", "", of["constant"]),
            Row(f"{name}: checks of healthy jobs per million steps", "", of["ours"]),
        ]
    return found


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
