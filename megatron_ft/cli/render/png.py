"""The page's figures as a picture file; needs matplotlib (the package's extra `report`)."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_ft.cli.analysis.analysis import Analysis
from megatron_ft.cli.analysis.failures import Failure
from megatron_ft.cli.analysis.raster import ABSENT, Grid, edges_ns, rasterize, state_names
from megatron_ft.cli.analysis.steps import step_times
from megatron_ft.cli.analysis.timeline import Timeline
from megatron_ft.cli.base.terminal import plain, took
from megatron_ft.cli.render import theme
from megatron_ft.cli.render.report_tables import SHOWN_S, goodput_line, header, period
from megatron_ft.records.rules.accounting import Goodput

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS, _DPI, _WIDTH_IN = 2400, 150, 16.0
_MOST_TEXTS, _LINE = 8, 150
"""Failures told below the picture, and characters of a line."""
_LEFT, _RIGHT = 0.06, 0.79  # of the width
_UNITS = ((3 * 3600, "hours", 3600), (600, "minutes", 60), (0, "seconds", 1))
"""From this many seconds on: the unit of the axis, and its length."""


def draw_png(analysis: Analysis, path: str) -> None:
    """Write the picture: goodput, ranks over time, step time.

    Raises:
        OSError: the file can't be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timeline, failures = analysis.timeline, analysis.failures
    length_s = timeline.since(None)
    unit, unit_s = next((name, each_s) for from_s, name, each_s in _UNITS if length_s >= from_s)
    grid = rasterize(timeline, edges_ns(timeline.begin_ns, timeline.end_ns, _COLUMNS))
    texts, steps = _texts(timeline, failures, unit, unit_s), step_times(timeline)
    steps = steps if len(steps) > 1 else []
    rows_in = float(np.clip(0.35 * len(grid.ranks), 1.2, 7.5))
    steps_in, below_in = (1.3 if steps else 0.0), 0.3 + 0.2 * len(texts)
    height_in = 1.7 + rows_in + 0.85 + steps_in + below_in
    # not pyplot: no global state, and no display is looked for
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=_DPI)
    FigureCanvasAgg(figure)

    def axes(top_in: float, tall_in: float) -> Axes:
        return figure.add_axes((_LEFT, 1 - (top_in + tall_in) / height_in, _RIGHT, tall_in / height_in))

    title = _shorten(header(analysis), _LINE)
    figure.text(_LEFT, 1 - 0.32 / height_in, _escaped(title), fontsize=13, weight="bold")
    goodput = analysis.run.accounting.goodput
    if goodput is not None:
        _draw_goodput(axes(0.62, 0.22), goodput)
    told = f"{period(analysis)}, {goodput_line(goodput).partition(':')[0]}"
    figure.text(_LEFT, 1 - 0.54 / height_in, _escaped(told), fontsize=10)
    ranks = axes(1.45, rows_in)
    _draw_grid(ranks, grid, timeline, unit, unit_s)
    _draw_cycles(ranks, timeline, unit_s)
    _draw_faults(ranks, grid, timeline, failures, unit_s)
    _draw_legend(ranks, grid, timeline, has_faults=bool(failures))
    if steps:
        below = axes(1.45 + rows_in + 0.75, steps_in - 0.2)
        at = [each.at_s / unit_s for each in steps]
        marker = "." if len(steps) < 60 else ""
        below.plot(at, [each.slowest_s for each in steps], color=theme.FAULT, linewidth=1, marker=marker)
        below.plot(at, [each.median_s for each in steps], color="#4e79a7", linewidth=2, marker=marker)
        below.set_xlim(ranks.get_xlim())
        below.set_ylim(0, 1.15 * max(each.slowest_s for each in steps))
        below.set_ylabel("step, s", fontsize=10)
        below.legend(["slowest rank", "median"], loc="upper left", bbox_to_anchor=(1.01, 1.05), frameon=False)
    for index, text in enumerate(texts):
        figure.text(_LEFT, (below_in - 0.25 - 0.2 * index) / height_in, _escaped(text), fontsize=9.5, color="#333333")
    figure.savefig(path, format="png")


def _draw_goodput(axes: Axes, goodput: Goodput) -> None:
    left = 0.0
    for of, seconds in goodput.seconds.items():
        if seconds >= SHOWN_S:
            label = f"{of.value.replace('_', ' ')} {took(seconds)}"
            axes.barh([0], [seconds], left=left, color=theme.TIMES[of], label=label)
            left += seconds
    axes.set_xlim(0, max(left, 1e-9))
    axes.set_axis_off()
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.1), ncols=8, frameon=False, fontsize=8, borderaxespad=0)


def _draw_grid(axes: Axes, grid: Grid, timeline: Timeline, unit: str, unit_s: float) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import MaxNLocator

    colors = theme.colors(len(timeline.names))
    right, rows = timeline.since(None) / unit_s, len(grid.ranks)
    axes.imshow(
        grid.states,
        cmap=ListedColormap(colors),
        vmin=-0.5,
        vmax=len(colors) - 0.5,
        aspect="auto",
        interpolation="nearest",
        extent=(0, right, rows - 0.5, -0.5),
    )
    if rows <= 64:
        for row in range(1, rows):
            axes.axhline(row - 0.5, color=theme.BACKGROUND, linewidth=2.0 if rows <= 16 else 0.5)
    axes.set_xlabel(f"{unit} since the start of the job", fontsize=11)
    axes.set_ylabel("rank", fontsize=11)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=16, integer=True, min_n_ticks=1))
    # rows are ranks in order; if numbers are missing, a row isn't the rank's number
    axes.yaxis.set_major_formatter(lambda row, _: str(grid.ranks[int(row)]) if 0 <= row < rows else "")
    axes.set_ylim(rows - 0.5, -0.5)


def _draw_cycles(axes: Axes, timeline: Timeline, unit_s: float) -> None:
    """Draw a line where a cycle begins, with its number above if there is room."""
    free_from = -1.0
    for cycle in timeline.run.cycles:
        at = timeline.since(cycle.begin_ns) / unit_s
        axes.axvline(at, color="black", linewidth=1.2, linestyle="--")
        place = at / max(axes.get_xlim()[1], 1e-9)
        if place >= free_from:
            free_from = place + 0.055
            where: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
            axes.annotate(f"cycle {cycle.cycle}", (at, 1.0), xytext=(3, 4), fontsize=10, annotation_clip=False, **where)


def _draw_faults(axes: Axes, grid: Grid, timeline: Timeline, failures: Sequence[Failure], unit_s: float) -> None:
    """Draw a numbered mark at each failure; the texts are below the picture."""
    for rank, since_s, until_s in theme.hung_lines(timeline, failures):
        row = [grid.ranks.index(rank)] * 2
        axes.plot([since_s / unit_s, until_s / unit_s], row, color=theme.FAULT, linewidth=3, solid_capstyle="butt")
    mark: dict[str, Any] = {"marker": "o", "markersize": 15, "markerfacecolor": theme.BACKGROUND, "zorder": 10}
    for each in failures:
        at = timeline.since(each.at_ns) / unit_s, grid.ranks.index(each.rank) if each.rank in grid.ranks else 0
        axes.plot(*at, markeredgecolor=theme.FAULT, markeredgewidth=2.2, clip_on=False, **mark)
        text: dict[str, Any] = {"weight": "bold", "ha": "center", "va": "center", "annotation_clip": False}
        axes.annotate(str(each.number), at, color=theme.FAULT, fontsize=10, zorder=11, **text)


def _draw_legend(axes: Axes, grid: Grid, timeline: Timeline, *, has_faults: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names, colors = state_names(timeline.names), theme.colors(len(timeline.names))
    seen = [int(state) for state in np.unique(grid.states) if state != ABSENT]
    entries: list[Any] = [
        Patch(facecolor=colors[state], edgecolor="#888888", label=_escaped(_shorten(names[state], 34)))
        for state in seen
    ]
    if has_faults:
        style: dict[str, Any] = {"markerfacecolor": theme.BACKGROUND, "markeredgecolor": theme.FAULT}
        entries.append(Line2D([], [], marker="o", linestyle="", markersize=10, label="failure, see below", **style))
    entries.append(Line2D([], [], color="black", linestyle="--", label="a cycle begins"))
    axes.legend(handles=entries, loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False, fontsize=9)


def _texts(timeline: Timeline, failures: Sequence[Failure], unit: str, unit_s: float) -> list[str]:
    lines: list[str] = []
    if len(failures) > _MOST_TEXTS:
        lines.append(f"{len(failures) - _MOST_TEXTS} earlier failures: see the report's tables")
    for each in failures[-_MOST_TEXTS:]:
        when = f"{timeline.since(each.at_ns) / unit_s:.2f} {unit}"
        text = f"({each.number})  cycle {each.cycle}, after {when}: {' '.join(each.text.split())}"
        lines += textwrap.wrap(_shorten(text, 3 * _LINE), _LINE, subsequent_indent="        ")
    return lines


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _escaped(text: str) -> str:
    """Escape a text: matplotlib takes what is between two dollars for a formula."""
    return plain(text).replace("$", r"\$")
