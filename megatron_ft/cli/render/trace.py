"""The timeline as trace events, for ui.perfetto.dev or chrome://tracing: JSON Object Format, times in microseconds.

One process per rank, with its sections on one thread, its marks on another and its minutes on a third; the cycles are a
process of their own, before the ranks. See "Trace Event Format" of the Chrome project.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megatron_ft.cli.analysis.analysis import Analysis
from megatron_ft.cli.analysis.timeline import Timeline
from megatron_ft.cli.render.report_tables import header
from megatron_ft.link.facts.minutes import HEARTBEAT, OUT_OF_SECTION, RankMinute
from megatron_ft.link.facts.monitor import Minute

_CYCLES_PID = 1_000_000_000
_SECTIONS, _MARKS, _MINUTES = 0, 1, 2


def write_trace(analysis: Analysis, path: str) -> None:
    """Write the file.

    Raises:
        OSError: the file can't be written.
    """
    about = {"run": analysis.run.run_id, "title": header(analysis)}
    with open(path, "w") as file:
        file.write('{"displayTimeUnit":"ms","otherData":' + json.dumps(about) + ',"traceEvents":[\n')
        separator = ""
        for event in _events(analysis.timeline):
            file.write(separator + json.dumps(event))
            separator = ",\n"
        file.write("\n]}\n")


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    hosts = {track.rank: track.host for track in timeline.tracks}
    yield _meta("process_name", _CYCLES_PID, name="cycles")
    yield _meta("process_sort_index", _CYCLES_PID, sort_index=-1)
    for rank in timeline.ranks:
        yield _meta("process_name", rank, name=f"rank {rank} ({hosts[rank]})")
        yield _meta("process_sort_index", rank, sort_index=rank)
        for thread, name in ((_SECTIONS, "sections"), (_MARKS, "marks"), (_MINUTES, "minutes")):
            yield {**_meta("thread_name", rank, name=name), "tid": thread}
    for cycle in timeline.run.cycles:
        where = {"name": f"cycle {cycle.cycle}", "cat": "cycle", "pid": _CYCLES_PID, "tid": 0}
        end_ns = timeline.end_ns if cycle.end_ns is None else cycle.end_ns
        yield _slice(timeline, where, cycle.begin_ns, end_ns, end=cycle.text)
    for mark in timeline.marks:
        own = mark.rank in hosts
        yield {
            "ph": "i",
            "s": "p" if own else "g",
            "name": mark.text,
            "cat": mark.kind,
            "pid": mark.rank if own else _CYCLES_PID,
            "tid": _MARKS,
            "ts": (mark.at_ns - timeline.begin_ns) / 1000,
            "args": {"cycle": mark.cycle},
        }
    for each in timeline.run.stream():
        if isinstance(each.record, Minute):
            for row in each.record.ranks:
                yield from _of_minute(timeline, each.record.cycle, row, each.wall_ns(each.record.at_ns))
    for track in timeline.tracks:  # sections that never ended until their rank's end
        open_ = {timeline.names[number]: begun_ns for number, _, begun_ns in track.still_open}
        if track.hang is not None and track.hung_since_ns is not None:
            open_.setdefault(track.hang.record.section or "hung out of section", track.hung_since_ns)
        for name, begun_ns in open_.items():
            where = {"name": name, "cat": "section", "pid": track.rank, "tid": _SECTIONS}
            yield _slice(timeline, where, begun_ns, track.end_ns, cycle=track.cycle, ended="with its rank")


def _of_minute(timeline: Timeline, cycle: int, minute: RankMinute, zero_ns: int) -> Iterator[dict[str, Any]]:
    """Yield the sections whose times are known, and the minute."""

    def slice_(name: str, kind: str, thread: int, begin_s: float, end_s: float, **told: str) -> dict[str, Any]:
        where = {"name": name, "cat": kind, "pid": minute.rank, "tid": thread}
        return _slice(
            timeline, where, zero_ns + round(begin_s * 1e9), zero_ns + round(end_s * 1e9), cycle=cycle, **told
        )

    told = {}
    for name, of in minute.sections.items():
        if of.count:
            told[name] = f"{of.count} in {of.total_s:.4g} s, the longest {max(of.longest_s, of.first_s):.4g} s"
        if name not in (OUT_OF_SECTION, HEARTBEAT):
            for begin_s, length_s in of.spans:
                yield slice_(name, "section", _SECTIONS, begin_s, begin_s + length_s)
    yield slice_("minute", "minute", _MINUTES, minute.from_s, minute.to_s, **told)


def _meta(event: str, pid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": event, "pid": pid, "tid": 0, "args": args}


def _slice(timeline: Timeline, where: dict[str, Any], begin_ns: int, end_ns: int, **args: Any) -> dict[str, Any]:
    at, took = (begin_ns - timeline.begin_ns) / 1000, max(0, end_ns - begin_ns) / 1000
    return {"ph": "X", **where, "ts": at, "dur": took, "args": args}
