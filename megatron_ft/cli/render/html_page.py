"""The page: one self-contained file that loads nothing, filled from ``page.html.jinja``.

Its Content-Security-Policy keeps it from making requests, whenever and wherever it is opened.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import os
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ft.cli.analysis.analysis import Analysis
from megatron_ft.cli.analysis.interval_lengths import Floats, lengths_of
from megatron_ft.cli.analysis.raster import ABSENT, Grid, edges_ns, rasterize, state_names
from megatron_ft.cli.analysis.steps import iterations_over_time, step_times
from megatron_ft.cli.analysis.suggestion import suggested_s
from megatron_ft.cli.analysis.timeline import EvidenceFile
from megatron_ft.cli.render import report_tables as tables
from megatron_ft.cli.render import theme
from megatron_ft.cli.render.terminal import took
from megatron_ft.core.wording import counted, listed
from megatron_ft.ipc.files.atomic_write import write_whole

MOST_BYTES = 64 * 1024
MOST_BYTES_IN_ALL = 512 * 1024
"""Bytes of evidence in the page; compressed they are a fifth or less."""
_MOST_MARKS = 1000
_SCREEN_COLUMNS, _FINER, _LEVELS = 900, 4, 3
_MOST_CELLS, _MOST_PACKED = 1_000_000, 60_000
_DETAIL_CELLS, _LEAST_DETAIL_COLUMNS, _MOST_DETAIL_COLUMNS, _MOST_DETAILS = 400_000, 600, 2000, 3
_BINS = 80
_MOST_DISTRIBUTIONS = 16
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 560, 210, 52, 8, 12, 38  # of a distribution, in its own units


@dataclass(frozen=True, kw_only=True)
class EvidenceText:
    """One piece of evidence in the page.

    Args:
        note: what is missing of the text, and why; "" if it is complete.
    """

    evidence: EvidenceFile
    text: str
    note: str


def write_page(analysis: Analysis, log_dirs: Sequence[str], path: str) -> str:
    """Write the page; evidence is read from ``log_dirs``.

    Returns:
        What was left out, in words; "" if nothing.

    Raises:
        OSError: the file can't be written.
    """
    # ranks, with their cycle, that a verdict, a finding or the cause of a cycle's end names
    named = {(mark.rank, mark.cycle) for mark in analysis.timeline.marks if mark.kind in ("verdict", "finding")}
    named |= {(cycle.cause.rank, cycle.cycle) for cycle in analysis.summary.cycles if cycle.cause}
    evidence = read_evidence(log_dirs, analysis.timeline.evidence, named)
    text = page(analysis, evidence)
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w", encoding="utf-8") as file:  # a pipe can't be replaced
            file.write(text)
    else:
        write_whole(path, text)
    cut = sum(bool(each.note) for each in evidence)
    return f" ({cut} of {len(evidence)} pieces of evidence are cut or missing in it, and say so)" if cut else ""


def read_evidence(
    log_dirs: Sequence[str],
    found: Sequence[EvidenceFile],
    culprits: Collection[tuple[int | None, int | None]] = (),
) -> list[EvidenceText]:
    """Return the texts in the log directories, up to ``MOST_BYTES_IN_ALL``.

    Args:
        culprits: ranks, each with the cycle, named by a record; their texts come first, then the newest.
    """
    directories = [Path(each) for each in log_dirs]
    left = MOST_BYTES_IN_ALL
    texts = []
    for each in sorted(found, key=lambda each: ((each.rank, each.cycle) not in culprits, -each.at_ns)):
        most = min(MOST_BYTES, left)
        has_it = (directory for directory in directories if (directory / each.file).is_file())
        read, note = _read(next(has_it, directories[0]), each.file, most)
        left -= len(read)
        texts.append(EvidenceText(evidence=each, text=read.decode(errors="replace"), note=note))
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


def page(analysis: Analysis, evidence: Sequence[EvidenceText]) -> str:
    """Return the text of the page."""
    from jinja2 import Environment, StrictUndefined

    timeline, run = analysis.timeline, analysis.summary
    goodput = run.accounting.goodput
    seconds = [] if goodput is None else [(of, s) for of, s in goodput.seconds.items() if s >= tables.SHOWN_S]
    template = resources.files("megatron_ft.cli.render").joinpath("page.html.jinja").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        title=theme.title(timeline),
        facts=_facts(analysis),
        share="-" if goodput is None else f"{goodput.share:.1%}",
        steps_told="" if goodput is None else tables.steps_told(goodput),
        times=[
            {
                "name": of.value.replace("_", " "),
                "seconds": round(s, 3),
                "told": f"{took(s)} ({s / goodput.total_s:.1%})" if goodput else "",
                "color": theme.TIMES[of],
            }
            for of, s in seconds
        ],
        definition=tables.GOODPUT,
        data=_json(_data(analysis, evidence)),
        hang_columns=tables.HANG_COLUMNS,
        hangs=[tables.hang_row(each) for each in run.accounting.hangs],
        cycle_columns=(*tables.CYCLE_COLUMNS, ""),
        cycles=[(*tables.cycle_row(cycle), "") for cycle in run.cycles],
        times_hint=tables.TIMES,
        interval_columns=(*tables.INTERVAL_COLUMNS, "suggested"),
        timeouts=[
            (*tables.interval_row(each), took(suggested_s(each.longest_s)) if each.longest_s is not None else "-")
            for each in analysis.intervals
        ],
        slow_columns=tables.SLOW_COLUMNS,
        slow=[tables.slow_row(each) for each in analysis.slow_ranks],
        notes=tables.interval_notes(analysis),
        distributions=list(_distributions(analysis)),
    )


def _facts(analysis: Analysis) -> str:
    timeline, run = analysis.timeline, analysis.summary
    began, ended = (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at / 1e9)) for at in (timeline.begin_ns, timeline.end_ns)
    )
    length = took((timeline.end_ns - timeline.begin_ns) / 1e9)
    hosts = f"{counted(len(run.hosts), 'node')} ({listed(list(run.hosts))})"
    return f"job {run.run_id} on {hosts}, from {began} to {ended}, {length}"


def _data(analysis: Analysis, evidence: Sequence[EvidenceText]) -> dict[str, Any]:
    """Return the data of the page's script; seconds since the beginning of the timeline."""
    timeline = analysis.timeline

    def since(at_ns: int) -> float:
        return (at_ns - timeline.begin_ns) / 1e9

    texts = [
        {
            "cycle": each.evidence.cycle,
            "rank": each.evidence.rank,
            "file": each.evidence.file,
            "summary": each.evidence.summary,
            "text": each.text,
            "note": each.note,
        }
        for each in evidence
    ]
    return {
        "begin_ms": timeline.begin_ns / 1e6,
        "length": since(timeline.end_ns),
        "ranks": timeline.ranks,
        **_timeline_data(analysis),
        "iterations": iterations_over_time(timeline),
        "steps": [
            {
                "at": round(each.at_s, 1),
                "median": round(each.median_s, 4),
                "slowest": round(each.slowest_s, 4),
                "rank": each.slowest_rank,
            }
            for each in step_times(timeline)
        ],
        "cycles": [
            {"number": each.number, "begin": since(each.begin_ns), "end": since(each.end_ns), "text": each.text}
            for each in timeline.cycles
        ],
        "windows": {each.cycle: [since(each.begin_ns), since(each.end_ns)] for each in analysis.windows},
        "failures": [
            {"number": each.number, "at": each.at_s, "cycle": each.cycle, "rank": each.rank, "text": each.text}
            for each in analysis.failures
        ],
        "marks": [
            {"at": since(each.at_ns), "cycle": each.cycle, "rank": each.rank, "text": each.text}
            for each in timeline.marks[-_MOST_MARKS:]
        ],
        "packed": _packed(json.dumps(texts).encode()),
    }


def _json(document: Any) -> str:
    """Return JSON that can't end the surrounding script element."""
    return json.dumps(document).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()


def _timeline_data(analysis: Analysis) -> dict[str, Any]:
    """Return what the page's script draws: ranks over time, coloured by state.

    The whole run is there several times, as a screen shows it and finer for a closer look, because columns that are
    dropped while drawing would be arbitrary ones; the last failures follow, finer still.
    """
    timeline = analysis.timeline
    grids: list[Grid] = []
    packed: list[dict[str, Any]] = []

    def add(grid: Grid) -> bool:
        states = _packed(grid.states.tobytes())
        if packed and sum(len(each["states"]) for each in packed) + len(states) > _MOST_PACKED:
            return False
        begin_s, end_s = ((int(edge) - timeline.begin_ns) / 1e9 for edge in (grid.edges_ns[0], grid.edges_ns[-1]))
        packed.append({"begin": begin_s, "end": end_s, "columns": grid.states.shape[1], "states": states})
        grids.append(grid)
        return True

    for columns in (_SCREEN_COLUMNS * _FINER**level for level in range(_LEVELS)):
        if grids and columns * len(timeline.ranks) > _MOST_CELLS:
            break
        if not add(rasterize(timeline, edges_ns(timeline.begin_ns, timeline.end_ns, columns))):
            break
    columns = int(np.clip(_DETAIL_CELLS // max(1, len(timeline.ranks)), _LEAST_DETAIL_COLUMNS, _MOST_DETAIL_COLUMNS))
    finest_ns = grids[-1].edges_ns[1] - grids[-1].edges_ns[0]
    for window in analysis.windows[-_MOST_DETAILS:]:
        edges = edges_ns(window.begin_ns, window.end_ns, columns)
        if 2 * (edges[1] - edges[0]) <= finest_ns:
            add(rasterize(timeline, edges))
    seen = sorted({int(state) for grid in grids for state in np.unique(grid.states)} - {ABSENT})
    return {
        "grids": packed,
        "states": state_names(timeline.names),
        "colors": theme.colors(len(timeline.names)),
        "seen": seen,
        "hung": theme.hung_lines(timeline, analysis.failures),
    }


def _distributions(analysis: Analysis) -> Iterator[dict[str, str]]:
    """Yield a histogram of each section's durations, with its timeout."""
    for interval in [each for each in analysis.intervals if each.count][:_MOST_DISTRIBUTIONS]:
        suggested = suggested_s(max(interval.longest_s or 0.0, interval.left_out_s or 0.0))
        lengths, weights = lengths_of([analysis.timeline], interval.name)
        name, timeout, longest, *_, margin = tables.interval_row(interval)
        yield {
            "name": name if len(name) <= 40 else name[:37] + "...",
            "facts": f"longest {longest}, margin {margin}",
            "limits": f"timeout {timeout}, suggested {took(suggested)}",
            "drawing": _histogram(lengths, weights, {"suggested": suggested, "timeout": interval.timeout_s}),
        }


def _histogram(seconds: Floats, weights: Floats, limits: dict[str, float | None]) -> str:
    """Return bins of equal ratio as SVG; both axes are logarithmic, and a count of 0 is at the bottom."""
    shown = [each for each in limits.values() if each]
    low, high = (max(1e-6, float(each)) for each in (seconds.min(), seconds.max()))
    edges = np.geomspace(low * 0.97, high * 1.03, _BINS + 1)
    counts, _ = np.histogram(np.maximum(seconds, 1e-6), bins=edges, weights=weights)
    left, right = math.log10(min([edges[0], *shown]) / 1.1), math.log10(max([edges[-1], *shown]) * 1.1)
    bottom, top = math.log10(0.5), math.log10(2 * max(1.0, float(counts.max())))

    def x(value: float) -> float:
        return round(_LEFT + (math.log10(value) - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        share = (math.log10(max(value, 0.5)) - bottom) / (top - bottom)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

    parts = []
    for value in _ticks(left, right, few=right - left > 4):
        parts.append(f'<path class="tick" d="M{x(value)} {_TOP}V{_HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text x="{x(value)}" y="{_HEIGHT - _BOTTOM + 14}" text-anchor="middle">{value:g}</text>')
    for value in _ticks(bottom, top, few=True):
        parts.append(f'<path class="tick" d="M{_LEFT} {y(value)}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4}" text-anchor="end">{value:g}</text>')
    steps = "".join(f"V{y(n)}H{x(until)}" for n, until in zip(counts.tolist(), edges[1:].tolist(), strict=True))
    parts.append(f'<path class="bins" d="M{x(float(edges[0]))} {y(0)}{steps}V{y(0)}Z"/>')
    for kind, limit_s in limits.items():
        if limit_s:
            parts.append(f'<path class="{kind}" d="M{x(limit_s)} {_TOP}V{_HEIGHT - _BOTTOM}"/>')
    parts.append(f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">seconds</text>')
    parts.append(f'<text transform="translate(12 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">intervals</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'


def _ticks(low: float, high: float, *, few: bool) -> list[float]:
    """Return round values between these powers of ten: 1 and, if there is room, 2 and 5 of each."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    if few and len(decades) > 8:
        decades = decades[:: len(decades) // 6]
    values = (digit * 10.0**decade for decade, digit in itertools.product(decades, (1,) if few else (1, 2, 5)))
    return [value for value in values if 10**low <= value <= 10**high]
