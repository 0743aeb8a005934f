"""Jobs, made up from a seed or recorded: how long every interval of one section took on every rank. In seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]
Made = tuple[Floats, Flags, Flags]
_EVERY_RUN = 5000
"""Steps between two failures that nobody is to blame for, on average."""
_FIRST = (2.0, 1.3)
"""How many times as long the first steps of a run take that the hooks have in a section."""


@dataclass(frozen=True)
class Trace:
    """``took_s`` has a row for each step and a column for each rank.

    Args:
        begins: the steps at which a run begins.
        repeats: a step that takes as long again when the restarted job comes to it.
        told: a slow step that is told from a hang, because some rank computes, reads or completes collectives, as in an
            evaluation or on a slow node, or is seen in a system call on a file.
    """

    name: str
    took_s: Floats
    begins: Flags
    repeats: Flags
    told: Flags


def make(name: str, seed: int, intervals: int) -> Trace:
    """One of `TRACES`; ``intervals`` are those of all its ranks."""
    rng = np.random.default_rng([seed, sorted(TRACES).index(name)])
    took_s, repeats, told = TRACES[name](rng, intervals)
    steps = len(took_s)
    begins = rng.random(steps) < 1.0 / _EVERY_RUN
    begins[0] = True
    return Trace(name, took_s if took_s.ndim == 2 else took_s[:, None], begins, repeats, told)


def recorded() -> list[Trace]:
    """Return the traces of real runs: how long each step took on every rank.

    They were made from event logs of schema 1, which had each interval of each rank. Whether a rank moved in a slow
    step wasn't in them: none is taken to.
    """
    found = []
    for path in sorted(Path(__file__).with_name("recorded").glob("*.json")):
        kept = json.loads(path.read_text())
        took_s = np.array(kept["took_ms"], dtype=np.float64).T / 1e3
        begins = _none(len(took_s))
        begins[kept["begins"]] = True
        none = _none(len(took_s))
        found.append(Trace(path.stem.replace("-", " "), np.maximum(took_s, 1e-3), begins, none, none))
    return found


def slow_first(steps_of_run: int) -> float:
    """The factor of a step that so many of its run precede."""
    return _FIRST[steps_of_run] if steps_of_run < len(_FIRST) else 1.0


def _none(steps: int) -> Flags:
    return np.zeros(steps, dtype=np.bool_)


def _body(rng: np.random.Generator, steps: int, spread: float = 0.05) -> Floats:
    return rng.lognormal(0.0, spread, steps)


def _steady(rng: np.random.Generator, steps: int) -> Made:
    return _body(rng, steps, 0.03), _none(steps), _none(steps)


def _heavy(rng: np.random.Generator, steps: int) -> Made:
    """One step in a hundred has a straggler, by a power law of index 1.5: a rank that has more to do."""
    slow = 1.5 * (1.0 + rng.pareto(1.5, steps))
    is_slow = rng.random(steps) < 0.01
    return np.minimum(np.where(is_slow, slow, _body(rng, steps)), 3600.0), _none(steps), is_slow


def _periodic(rng: np.random.Generator, steps: int) -> Made:
    """Garbage collection every 100 steps, an evaluation every 1000, the end of the data every 20,000."""
    took_s, at = _body(rng, steps), np.arange(1, steps + 1)
    repeats = _none(steps)
    for every, factor, width in ((100, 1.5, 1), (1000, 8.0, 4), (20_000, 40.0, 1)):
        due = (at % every < width) & (at >= every)
        took_s[due] = factor * _body(rng, int(due.sum()))
        repeats |= due
    return took_s, repeats, repeats


def _drifting(rng: np.random.Generator, steps: int) -> Made:
    """Longer sequences, other batches: every 20,000 steps another level, and a slow wave on it."""
    parts = steps // 20_000 + 1
    levels = np.clip(np.exp(np.cumsum(rng.uniform(-0.7, 0.7, parts))), 0.25, 8.0)
    wave = 1.0 + 0.2 * np.sin(np.arange(steps) / 3000.0)
    return _body(rng, steps) * np.repeat(levels, 20_000)[:steps] * wave, _none(steps), ~_none(steps)


def _stalls(rng: np.random.Generator, steps: int) -> Made:
    """Every 3000 steps the file system stands still for some 20 s, in up to three steps in a row."""
    took_s, stalls = _body(rng, steps), _none(steps)
    for at in np.flatnonzero(rng.random(steps) < 1.0 / 3000):
        width = int(rng.integers(1, 4))
        took_s[at : at + width] += rng.lognormal(np.log(20.0), 0.5, len(took_s[at : at + width]))
        stalls[at : at + width] = True
    return took_s, _none(steps), stalls


def _unseen(rng: np.random.Generator, steps: int) -> Made:
    """The same, where no rank can say that it waits for a file."""
    took_s, repeats, _ = _stalls(rng, steps)
    return took_s, repeats, _none(steps)


def _slow_node(rng: np.random.Generator, steps: int) -> Made:
    """Eight ranks; now and then two of them, a node, take three times as long for a while, some steps far longer."""
    steps //= 8
    took_s = rng.lognormal(0.0, 0.05, (steps, 8))
    at = 0
    while at < steps:
        good, bad, node = (int(x) for x in (*rng.exponential((12_000, 3000)), rng.integers(0, 4)))
        slow = took_s[at + good : at + good + bad, 2 * node : 2 * node + 2]
        slow *= 3.0 + 5.0 * (rng.random(len(slow)) < 0.003)[:, None]
        at += good + bad
    return took_s, _none(steps), ~_none(steps)


TRACES: dict[str, Callable[[np.random.Generator, int], Made]] = {
    "steady": _steady,
    "heavy tail": _heavy,
    "periodic": _periodic,
    "drifting": _drifting,
    "file-system stalls": _stalls,
    "one slow node": _slow_node,
    "stalls that no rank can tell": _unseen,
}
