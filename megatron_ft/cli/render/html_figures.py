"""Figures of the page: the timeline as grids that its script draws, and durations of sections as SVG. Pure."""

from __future__ import annotations

import base64
import itertools
import math
import zlib
from collections.abc import Iterator
from html import escape
from typing import Any

import numpy as np

from megatron_ft.cli.analysis.analysis import Analysis
from megatron_ft.cli.analysis.interval_lengths import Floats, LoggedInterval, lengths_of
from megatron_ft.cli.analysis.raster import ABSENT, Grid, edges_ns, rasterize, state_names
from megatron_ft.cli.analysis.suggestion import suggested_s
from megatron_ft.cli.analysis.timeline import Timeline
from megatron_ft.cli.render import theme
from megatron_ft.cli.render.report_tables import interval_row
from megatron_ft.cli.render.terminal import took

_SCREEN_COLUMNS, _FINER, _LEVELS = 900, 4, 3
_MOST_CELLS = 1_500_000
_DETAIL_CELLS, _LEAST_DETAIL_COLUMNS, _MOST_DETAIL_COLUMNS, _MOST_DETAILS = 400_000, 600, 2000, 3
_BINS = 80
_MOST_DISTRIBUTIONS = 16
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 560, 210, 52, 8, 12, 38  # of a distribution, in its own units


def timeline_data(analysis: Analysis) -> dict[str, Any]:
    """Return what the page's script draws: ranks over time, coloured by state. Seconds since the beginning.

    The whole run is there several times, as a screen shows it and finer for a closer look, because columns that are
    dropped while drawing would be arbitrary ones; the last failures follow, finer still.
    """
    timeline = analysis.timeline
    rows = max(1, len(timeline.ranks))
    columns = [_SCREEN_COLUMNS * _FINER**level for level in range(_LEVELS)]
    whole = [
        rasterize(timeline, edges_ns(timeline.begin_ns, timeline.end_ns, each))
        for each in columns
        if each == _SCREEN_COLUMNS or each * rows <= _MOST_CELLS
    ]
    grids = [*whole, *_details(analysis, whole[-1])]
    seen = sorted({int(state) for grid in grids for state in np.unique(grid.states)} - {ABSENT})
    names, colors = state_names(timeline.names), theme.colors(len(timeline.names))
    return {
        "grids": [_packed(grid, timeline) for grid in grids],
        "states": names,
        "colors": colors,
        "seen": seen,
        "hung": theme.hung_lines(timeline, analysis.failures),
    }


def _details(analysis: Analysis, whole: Grid) -> Iterator[Grid]:
    """Yield finer grids around the last failures, where the whole isn't fine enough."""
    columns = int(np.clip(_DETAIL_CELLS // max(1, len(whole.ranks)), _LEAST_DETAIL_COLUMNS, _MOST_DETAIL_COLUMNS))
    for window in analysis.windows[-_MOST_DETAILS:]:
        edges = edges_ns(window.begin_ns, window.end_ns, columns)
        if 2 * (edges[1] - edges[0]) <= whole.edges_ns[1] - whole.edges_ns[0]:
            yield rasterize(analysis.timeline, edges)


def _packed(grid: Grid, timeline: Timeline) -> dict[str, Any]:
    begin_s, end_s = ((int(edge) - timeline.begin_ns) / 1e9 for edge in (grid.edges_ns[0], grid.edges_ns[-1]))
    packed = base64.b64encode(zlib.compress(grid.states.tobytes(), 9)).decode()
    return {"begin": begin_s, "end": end_s, "columns": grid.states.shape[1], "states": packed}


def distributions(analysis: Analysis) -> str:
    """Return a histogram of each section's durations, with its timeout, as HTML; "" if nothing was observed."""
    figures = []
    for interval in [each for each in analysis.intervals if each.count][:_MOST_DISTRIBUTIONS]:
        longest_s = max(interval.longest_s or 0.0, interval.left_out_s or 0.0)
        suggested = suggested_s(longest_s)
        drawing = _histogram(*lengths_of([analysis.timeline], interval.name), interval.timeout_s, suggested)
        figures.append(f"<figure><figcaption>{_caption(interval, suggested)}</figcaption>{drawing}</figure>")
    return "".join(figures)


def _caption(interval: LoggedInterval, suggested: float) -> str:
    name, timeout, longest, *_, margin = interval_row(interval)
    name = name if len(name) <= 40 else name[:37] + "..."
    facts = f"longest {longest}, margin {margin}<br>timeout {timeout}, suggested {took(suggested)}"
    return f"<strong>{escape(name)}</strong>: {facts}"


def _histogram(seconds: Floats, weights: Floats, timeout_s: float | None, suggested: float) -> str:
    """Return bins of equal ratio as SVG; both axes are logarithmic, and a count of 0 is at the bottom."""
    shown = [each for each in (timeout_s, suggested) if each]
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
    for limit_s, kind in ((suggested, "suggested"), (timeout_s, "timeout")):
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
