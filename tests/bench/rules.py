"""Rule for learned timeouts on made-up jobs: how often it ends a healthy rank, and how late it would see a hang.

Nothing is judged before the first save. A step that a kill cut short is repeated only if it takes as long again for a
reason (an evaluation, the end of the data), and five times at most; where it isn't, the job goes on behind it. Both
spare the rule that kills more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_ft.diagnosis.rank_snapshot import EVIDENCE_S
from megatron_ft.learning.messages import Observed
from megatron_ft.learning.rule import MOST_EXTENDED, calculate
from megatron_ft.learning.timeouts import LearnedState, floored
from tests.bench.figures import shown, table
from tests.bench.traces import TRACES, Floats, Trace, make, recorded, slow_first

SAVE_EVERY = 250
FACTOR = 5.0
FLOOR_S = 60.0
_MOST_REPEATS = 5
_NONE = float("inf")

PATTERNS: dict[str, tuple[str, list[float], float, bool]] = {
    "many empty finalisations, then one of 40 s": ("checkpointing", [1.5], 40.0, False),
    "the first save takes 12 s": ("checkpointing", [], 12.0, False),
    "a file server stalls for 9 s": ("step", [0.1] * 5000, 9.0, False),
    "a file server stalls for 45 s": ("step", [0.1] * 5000, 45.0, False),
    "index of a data shard, 30 s": ("step", [4.0] * 200, 30.0, False),
    "a rollout of 320 s": ("step", [20.0, 60.0] * 50, 320.0, True),
    "longer sequences": ("step", [1.0] * 500, 8.0, False),
    "an evaluation inside the step": ("step", [2.0] * 100, 15.0, False),
    "a cold setup after a warm one": ("setup", [12.0], 90.0, False),
    "60 s of cold cache after a quick setup": ("setup", [2.0], 62.0, False),
    "a node compiles again for 50 s": ("step", [0.3] * 1000, 50.0, False),
    "export after the last save": ("out_of_section", [4.0] * 20, 59.0, False),
    "a larger save": ("checkpointing", [20.0] * 10, 99.0, False),
    "a save to a busy file system, seen waiting": ("checkpointing", [20.0] * 10, 380.0, True),
}
"""Healthy jobs: section, intervals so far, the next one, and whether a rank is seen to make progress in it."""


class Reference:
    """What learns in a job: a factor times the longest of this run, averaged with the last timeout. No floor, no look.

    Times are seconds.
    """

    looks = False
    """A rank that is suspected is ended after the evidence, unless its step is told from a hang (`Trace.told`)."""

    def __init__(self) -> None:
        self.timeout_s = self.limit_s = _NONE
        """After which a step is ended, and one in which ranks are seen to make progress."""
        self._longest_s = 0.0

    def restart(self) -> None:
        """Begin a run: the processes are new."""
        self._longest_s = 0.0

    def killed(self, *, moved: bool) -> None:
        """Take note that the timeout has ended the last run; ``moved``: ranks were seen to make progress."""
        self.restart()

    def saw(self, longest_s: float) -> None:
        """Take note of steps of all ranks that have ended."""
        self._longest_s = max(self._longest_s, longest_s)

    def update(self) -> None:
        """All ranks save."""
        before = None if self.timeout_s == _NONE else self.timeout_s
        self.timeout_s = self.limit_s = calculate(self._longest_s, before, FACTOR)


class OneRule(Reference):
    """Ours, as launchers apply it."""

    looks = True

    def __init__(self, section: str = "step") -> None:
        super().__init__()
        self._section = section
        self._state = LearnedState()
        self._kills = 0
        """Number of runs in a row that the timeout has ended."""

    def killed(self, *, moved: bool) -> None:
        super().killed(moved=moved)
        if moved or self._kills:
            self._state = self._state.doubled(self._section, self.timeout_s, {})
        self._kills += 1
        self._apply()

    def update(self) -> None:
        self._kills = 0
        self._state = self._state.learn({self._section: Observed(1, self._longest_s)}, FACTOR)
        self._apply()

    def _apply(self) -> None:
        self.timeout_s = floored(self._state.timeouts, FLOOR_S).get(self._section, _NONE)
        self.limit_s = MOST_EXTENDED * self.timeout_s


def survives(section: str, seen_s: list[float], next_s: float, *, told: bool) -> bool:
    """Return True if the rule ends no rank in the next interval of a healthy job."""
    rule = OneRule(section)
    if seen_s:
        rule.saw(max(seen_s))
        rule.update()
    return next_s <= (rule.limit_s if told else rule.timeout_s)


@dataclass(frozen=True)
class Outcome:
    """``delay_s`` is the mean of the time after which a rank that hangs is ended."""

    steps: int
    kills: int
    delay_s: float


def play(trace: Trace, rule: Reference) -> Outcome:
    """Let a rule end the ranks of a job."""
    steps = len(trace.took_s)
    begins = np.flatnonzero(trace.begins)
    told = trace.told if rule.looks else np.zeros(steps, dtype=np.bool_)
    at = of_run = kills = tries = judged = 0
    delay = 0.0
    while at < steps:
        if trace.begins[at] and not tries:
            rule.restart()
            of_run = 0
        later = begins[np.searchsorted(begins, at, side="right") :]
        end = min([at + SAVE_EVERY - of_run % SAVE_EVERY, steps, *later[:1].tolist()])
        took = _longest(trace.took_s[at:end], of_run)
        late = np.flatnonzero(took > np.where(told[at:end], rule.limit_s, rule.timeout_s))
        done = int(late[0]) if len(late) else len(took)
        if rule.timeout_s != _NONE:
            delay, judged = delay + (rule.timeout_s + (EVIDENCE_S if rule.looks else 0.0)) * done, judged + done
        if done:
            rule.saw(float(took[:done].max()))
        at += done
        if not len(late):
            of_run += done
            tries = 0
            if of_run % SAVE_EVERY == 0:
                rule.update()
            continue
        kills += 1
        tries = tries + 1 if not done else 1
        moved = bool(told[at])
        if not trace.repeats[at] or tries >= _MOST_REPEATS:
            at, tries = at + 1, 0
        rule.killed(moved=moved)
        # it goes on from the last save, slowly at first, and comes here later
        rule.saw(float(np.median(took)) * slow_first(0))
        of_run = 4
    return Outcome(steps, kills, delay / max(judged, 1))


def _longest(took_s: Floats, of_run: int) -> Floats:
    """Return the longest time of each step over all ranks; the first ones of a run take longer."""
    took = took_s.max(axis=1).copy()
    for index in range(min(8, len(took))):
        took[index] *= slow_first(of_run + index)
    return took


def measure(_reference: str | None, runs: int) -> dict[str, Any]:
    """Return sums over some seeds; the recorded jobs are what they are."""
    intervals = 1_000_000 if runs > 2 else 100_000  # of all ranks of one job
    made = {name: _measure([make(name, seed, intervals) for seed in range(min(runs, 4))]) for name in TRACES}
    jobs = {**made, **{f"recorded, {each.name}": _measure([each]) for each in recorded()}}
    ended = sum(not survives(section, seen, next_s, told=told) for section, seen, next_s, told in PATTERNS.values())
    return {"jobs": jobs, "ended": ended}


def _measure(traces: list[Trace]) -> dict[str, float]:
    found = {}
    for name, kind in (("ours", OneRule), ("reference", Reference)):
        played = [play(trace, kind()) for trace in traces]
        found[name] = 1e6 * sum(each.kills for each in played) / sum(each.steps for each in played)
        found[f"{name}_s"] = sum(each.delay_s for each in played) / len(played)
    return found


def table_of(result: dict[str, Any]) -> str:
    head = ["", "false kills per 10^6 steps", "a hang is ended after", "the reference's", "after"]
    units = {"ours": "", "ours_s": " s", "reference": "", "reference_s": " s"}
    rows = [[name, *(shown(of[key], unit) for key, unit in units.items())] for name, of in result["jobs"].items()]
    return f"{table(head, rows)}\n\n{result['ended']} of {len(PATTERNS)} healthy patterns are ended"
