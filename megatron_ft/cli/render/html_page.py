"""The page: one self-contained file that loads nothing, filled from ``page.html.jinja``.

Its Content-Security-Policy keeps it from making requests, whenever and wherever it is opened.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import re
import zlib
from collections.abc import Collection, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ft.cli.analysis.analysis import Analysis
from megatron_ft.cli.analysis.failures import Failure, failures_of
from megatron_ft.cli.analysis.raster import ABSENT, FAULT_COLOR, edges_ns, rasterize, states_of
from megatron_ft.cli.analysis.steps import iterations_over_time, step_times
from megatron_ft.cli.analysis.timeline import Int64s, Timeline
from megatron_ft.cli.base.terminal import took
from megatron_ft.cli.render import report_tables as tables
from megatron_ft.link.base.codec import to_builtins
from megatron_ft.link.facts.all_kinds import Timed
from megatron_ft.link.facts.shared import Evidence
from megatron_ft.link.files.atomic_write import write_whole
from megatron_ft.records.rules.accounting import TimeClass

_TIMES = {
    TimeClass.PRODUCTIVE: "#3f8f4f",
    TimeClass.REDONE: "#f2b134",
    TimeClass.SAVE: "#4e79a7",
    TimeClass.LOAD: "#76b7b2",
    TimeClass.LAUNCH: "#7d8590",
    TimeClass.START_UP: "#a9b1ba",
    TimeClass.DETECTION: "#e8743b",
    TimeClass.HUNG: FAULT_COLOR,
    TimeClass.RESTART: "#b07aa1",
    TimeClass.WAITING: "#d4a6c8",
    TimeClass.PAUSED: "#9c755f",
    TimeClass.AFTER_END: "#cfd4da",
}
"""Colour of each class of the job's time."""
MOST_BYTES = 64 * 1024
MOST_BYTES_IN_ALL = 512 * 1024
"""Bytes of evidence in the page; compressed they are a fifth or less."""
_MOST_MARKS = 1000
_SCREEN_COLUMNS, _FINER, _LEVELS = 900, 4, 3
_MOST_CELLS, _MOST_PACKED = 1_000_000, 60_000
_DETAIL_CELLS, _LEAST_DETAIL_COLUMNS, _MOST_DETAIL_COLUMNS, _MOST_DETAILS = 400_000, 600, 2000, 3


def write_page(analysis: Analysis, log_dirs: Sequence[str], path: str) -> str:
    """Write the page; evidence is read from ``log_dirs``.

    Returns:
        What was left out, in words; "" if nothing.

    Raises:
        OSError: the file can't be written.
    """
    # ranks, with their cycle, that a verdict, a finding or the cause of a cycle's end names
    named = {(mark.rank, mark.cycle) for mark in analysis.timeline.marks if mark.kind in ("verdict", "finding")}
    named |= {(cycle.cause.rank, cycle.cycle) for cycle in analysis.run.cycles if cycle.cause}
    evidence = read_evidence(log_dirs, analysis.timeline.evidence, named)
    text = page(analysis, evidence)
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w", encoding="utf-8") as file:  # a pipe can't be replaced
            file.write(text)
    else:
        write_whole(path, text)
    cut = sum(bool(each["note"]) for each in evidence)
    return f" ({cut} of {len(evidence)} pieces of evidence are cut or missing in it, and say so)" if cut else ""


def read_evidence(
    log_dirs: Sequence[str],
    found: Sequence[Timed[Evidence]],
    culprits: Collection[tuple[int | None, int | None]] = (),
) -> list[dict[str, Any]]:
    """Return the evidence with its ``text`` from the log directories, up to ``MOST_BYTES_IN_ALL``.

    ``note`` says what is missing of a text, and why; "" if it is complete.

    Args:
        culprits: ranks, each with the cycle, named by a record; their texts come first, then the newest.
    """
    directories = [Path(each) for each in log_dirs]
    left = MOST_BYTES_IN_ALL
    texts = []
    by_need = sorted(found, key=lambda each: ((each.record.rank, each.record.cycle) not in culprits, -each.at_ns))
    for evidence in (each.record for each in by_need):
        has_it = (directory for directory in directories if (directory / evidence.file).is_file())
        read, note = _read(next(has_it, directories[0]), evidence.file, min(MOST_BYTES, left))
        left -= len(read)
        texts.append({**to_builtins(evidence), "text": read.decode(errors="replace"), "note": note})
    return texts


def _read(log_dir: Path, name: str, most: int) -> tuple[bytes, str]:
    try:
        path = (log_dir / name).resolve()
        # the log may be another user's: it must not put foreign files into a page that is handed around
        if not path.is_relative_to(log_dir.resolve()) or not path.is_file():
            return b"", f"{name} is not a file in the log directory"
        size = path.stat().st_size
        if not most:
            return b"", f"left out: this page holds {MOST_BYTES_IN_ALL >> 10} KiB of evidence already; see {name}"
        with path.open("rb") as file:
            read = file.read(most)
    except (OSError, ValueError) as error:
        return b"", f"{name} can't be read: {error}"
    cut = f"cut after {len(read)} of {size} bytes; see {name}" if size > len(read) else ""
    return read, cut


def page(analysis: Analysis, evidence: Sequence[dict[str, Any]]) -> str:
    """Return the text of the page."""
    from jinja2 import Environment, StrictUndefined

    goodput = analysis.run.accounting.goodput
    seconds = {} if goodput is None else goodput.seconds
    template = resources.files("megatron_ft.cli.render").joinpath("page.html.jinja").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    # JSON without these characters can't end the script element around it
    return environment.from_string(template).render(
        header=tables.header(analysis),
        period=tables.period(analysis),
        goodput=goodput,
        goodput_line=tables.goodput_line(goodput).partition(":")[0].removeprefix("goodput "),
        times=[
            (of.value.replace("_", " "), round(s, 3), f"{took(s)} ({s / sum(seconds.values()):.1%})", _TIMES[of])
            for of, s in seconds.items()
            if s >= tables.SHOWN_S
        ],
        definition=tables.GOODPUT,
        sheets={sheet.name: sheet for sheet in tables.sheets(analysis)},
        data=re.sub("[&<>]", lambda each: f"\\u{ord(each[0]):04x}", json.dumps(_data(analysis, evidence))),
    )


def _data(analysis: Analysis, evidence: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the data of the page's script; seconds since the beginning of the timeline."""
    timeline = analysis.timeline
    since, failures = timeline.since, list(failures_of(timeline))
    return {
        "begin_ms": timeline.begin_ns / 1e6,
        "length": since(None),
        "ranks": timeline.ranks,
        **_timeline_data(timeline, failures),
        "iterations": iterations_over_time(timeline),
        "steps": step_times(timeline),
        "cycles": [
            {"number": each.cycle, "begin": since(each.begin_ns), "end": since(each.end_ns)}
            for each in timeline.run.cycles
        ],
        "failures": [
            {
                **dataclasses.asdict(each),
                "at": since(each.at_ns),
                "from": since(each.from_ns),
                "to": since(each.to_ns),
            }
            for each in failures
        ],
        "marks": [
            {"at": since(each.at_ns), "cycle": each.cycle, "rank": each.rank, "text": each.text}
            for each in timeline.marks[-_MOST_MARKS:]
        ],
        "packed": _packed(json.dumps(evidence).encode()),
    }


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()


def _timeline_data(timeline: Timeline, failures: Sequence[Failure]) -> dict[str, Any]:
    """Return what the page's script draws: ranks over time, coloured by state.

    The whole run is there several times, as a screen shows it and finer for a closer look, because columns that are
    dropped while drawing would be arbitrary ones; the last failures follow, finer still.
    """
    packed: list[dict[str, Any]] = []
    seen: set[int] = set()

    def add(edges: Int64s) -> bool:
        grid = rasterize(timeline, edges)
        states = _packed(grid.tobytes())
        if packed and sum(len(each["states"]) for each in packed) + len(states) > _MOST_PACKED:
            return False
        begin_s, end_s = ((int(edge) - timeline.begin_ns) / 1e9 for edge in (edges[0], edges[-1]))
        packed.append({"begin": begin_s, "end": end_s, "columns": grid.shape[1], "states": states})
        seen.update(np.unique(grid).tolist())
        return True

    for columns in (_SCREEN_COLUMNS * _FINER**level for level in range(_LEVELS)):
        edges = edges_ns(timeline.begin_ns, timeline.end_ns, columns)
        if (packed and columns * len(timeline.ranks) > _MOST_CELLS) or not add(edges):
            break
    columns = int(np.clip(_DETAIL_CELLS // max(1, len(timeline.ranks)), _LEAST_DETAIL_COLUMNS, _MOST_DETAIL_COLUMNS))
    for failure in failures[-_MOST_DETAILS:]:
        add(edges_ns(failure.from_ns, failure.to_ns, columns))
    states = states_of(timeline.names)
    named = {(each.rank, each.cycle) for each in failures}
    named |= {(each.rank, each.cycle) for each in timeline.run.accounting.hangs}
    return {
        "grids": packed,
        "states": [name for name, _ in states],
        "colors": [color for _, color in states],
        "seen": sorted(seen - {ABSENT}),
        "hung": [  # among hundreds of ranks, a row alone is too thin to be seen
            (track.rank, timeline.since(track.hung_since_ns), timeline.since(track.end_ns))
            for track in timeline.tracks
            if track.hang is not None and (track.rank, track.cycle) in named
        ],
    }
