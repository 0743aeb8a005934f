"""The timeline as trace events, for ui.perfetto.dev or chrome://tracing: JSON Object Format, times in microseconds.

One process per rank, with its sections on one thread and its marks on another; the cycles are a process of their own,
before the ranks. See "Trace Event Format" of the Chrome project.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ft.cli.analysis.timeline import Timeline, Track
from megatron_ft.cli.render.theme import title

MOST_SPANS = 500_000
_CYCLES_PID = 1_000_000_000
_SECTIONS, _MARKS, _MINUTES = 0, 1, 2
_NEAR_THE_END = 50  # spans before the end of a rank that are always kept


def write_trace(timeline: Timeline, path: str, *, most_spans: int = MOST_SPANS) -> str:
    """Write the file.

    Returns:
        What was left out, in words; "" if nothing.

    Raises:
        OSError: the file can't be written.
    """
    thinning = _thinning(timeline, most_spans)
    every, last = thinning
    note = f" (thinned to about {most_spans} sections: 1 of {every} of each rank and name, and the last {last}"
    note = "" if every == 1 else f"{note} of each rank and cycle)"
    about = {"run": timeline.summary.run_id, "title": title(timeline), "left out": note.strip() or "nothing"}
    with open(path, "w") as file:
        file.write('{"displayTimeUnit":"ms","otherData":' + json.dumps(about) + ',"traceEvents":[\n')
        separator = ""
        for event in _events(timeline, thinning):
            file.write(separator + event)
            separator = ",\n"
        file.write("\n]}\n")
    return note


def _events(timeline: Timeline, thinning: tuple[int, int]) -> Iterator[str]:
    """Yield all events as JSON; sections are thinned out, except at the end of each rank and cycle."""
    yield from map(json.dumps, _names(timeline))
    yield from map(json.dumps, _cycles(timeline))
    yield from map(json.dumps, _marks(timeline))
    every = math.ceil(sum(len(track.minutes) for track in timeline.tracks) / MOST_SPANS)
    for track in timeline.tracks:
        yield from _sections(timeline, track, thinning)
        yield from map(json.dumps, _minutes(timeline, track, max(1, every)))


def _us(timeline: Timeline, at_ns: int) -> float:
    return (at_ns - timeline.begin_ns) / 1000


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    hosts = {track.rank: track.host for track in timeline.tracks}
    names = {_CYCLES_PID: "cycles", **{rank: f"rank {rank} ({hosts[rank]})" for rank in timeline.ranks}}
    for pid, name in names.items():
        order = -1 if pid == _CYCLES_PID else pid
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": _SECTIONS, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": _SECTIONS, "args": {"sort_index": order}}


def _cycles(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for cycle in timeline.cycles:
        yield {
            "ph": "X",
            "name": f"cycle {cycle.number}",
            "cat": "cycle",
            "pid": _CYCLES_PID,
            "tid": _SECTIONS,
            "ts": _us(timeline, cycle.begin_ns),
            "dur": max(0.0, (cycle.end_ns - cycle.begin_ns) / 1000),
            "args": {"end": cycle.text},
        }


def _marks(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield faults, verdicts, exits and findings, on the rank's process or on that of the cycles."""
    known = set(timeline.ranks)
    for mark in timeline.marks:
        own = mark.rank in known
        yield {
            "ph": "i",
            "s": "p" if own else "g",
            "name": mark.text,
            "cat": mark.kind,
            "pid": mark.rank if own else _CYCLES_PID,
            "tid": _MARKS,
            "ts": _us(timeline, mark.at_ns),
            "args": {"cycle": mark.cycle},
        }


def _sections(timeline: Timeline, track: Track, thinning: tuple[int, int]) -> Iterator[str]:
    """Yield sections as complete events; those that never ended last as long as their rank, marked as such."""
    names = [json.dumps(name) for name in timeline.names]
    tail = f'"pid":{track.rank},"tid":{_SECTIONS},"args":{{"cycle":{track.cycle}'
    if track.spans is not None:
        closed = track.spans.closed
        kept = _kept(closed.sections, *thinning)
        begin_us = ((closed.begin_ns[kept] - timeline.begin_ns) / 1000).tolist()
        took_us = ((closed.end_ns[kept] - closed.begin_ns[kept]) / 1000).tolist()
        for at, took, section in zip(begin_us, took_us, closed.sections[kept].tolist(), strict=True):
            yield f'{{"ph":"X","name":{names[section]},"cat":"section","ts":{at:.1f},"dur":{took:.1f},{tail}}}}}'
    for name, begin_ns in _endless(timeline, track):
        at, took = _us(timeline, begin_ns), max(0.0, (track.end_ns - begin_ns) / 1000)
        words = json.dumps(name)
        ended = ',"ended":"with its rank"}}'
        yield f'{{"ph":"X","name":{words},"cat":"section","ts":{at:.1f},"dur":{took:.1f},{tail}{ended}'


def _minutes(timeline: Timeline, track: Track, every: int) -> Iterator[dict[str, Any]]:
    """Yield a slice for each minute with what its intervals add up to, on a row of its own."""
    for minute in track.minutes[::every]:
        told = {
            name: f"{of.count} in {of.total_s:.4g} s, the longest {max(of.longest_s, of.first_s):.4g} s"
            for name, of in minute.of.sections.items()
            if of.count
        }
        yield {
            "ph": "X",
            "name": "minute",
            "cat": "minute",
            "pid": track.rank,
            "tid": _MINUTES,
            "ts": _us(timeline, minute.from_ns),
            "dur": max(0.0, (minute.to_ns - minute.from_ns) / 1000),
            "args": {"cycle": track.cycle, **told},
        }


def _endless(timeline: Timeline, track: Track) -> Iterable[tuple[str, int]]:
    """Return names and beginnings of the sections that never ended; the verdict may know one that the events lack."""
    found = [(timeline.names[section], begin_ns) for section, begin_ns in track.still_open()]
    if track.hang is not None:
        section = track.hang.section
        if section is None:
            found.append(("hung out of section", track.hang.since_ns))
        elif section not in [name for name, _ in found]:
            found.append((section, track.hang.since_ns))
    return found


def _thinning(timeline: Timeline, most: int) -> tuple[int, int]:
    """Return how to thin spans: one of so many per name, the same ones on all ranks, and the number of last ones kept.

    The last few before a rank ended matter most; they get at most half of the room.
    """
    counts = [len(track.spans.closed.sections) for track in timeline.tracks if track.spans is not None]
    if sum(counts) <= most:
        return 1, 0
    last = min(_NEAR_THE_END, most // (2 * len(counts)))
    return math.ceil(sum(counts) / max(1, most - last * len(counts))), last


def _kept(sections: npt.NDArray[np.uint16], every: int, last: int) -> npt.NDArray[np.intp]:
    if every == 1:
        return np.arange(len(sections))
    kept = np.zeros(len(sections), dtype=np.bool_)
    for section in np.unique(sections):
        kept[np.nonzero(sections == section)[0][::every]] = True
    kept[len(kept) - min(last, len(kept)) :] = True
    return np.nonzero(kept)[0]
