"""The timeline as a picture file; needs matplotlib (the package's extra `report`)."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_ft.cli.analysis.analysis import Analysis
from megatron_ft.cli.analysis.failures import Failure
from megatron_ft.cli.analysis.raster import ABSENT, Grid, edges_ns, rasterize, state_names
from megatron_ft.cli.analysis.timeline import Timeline
from megatron_ft.cli.render import theme
from megatron_ft.cli.render.terminal import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 2400
_DPI = 150
_WIDTH_IN = 16.0
_MOST_TEXTS = 8
_TITLE_IN, _AROUND_IN = 0.6, 1.05  # above all; above and below each stretch of time
_SMALL = 8  # a window this many times smaller than the run is shown once more, closely
_LINE = 150  # characters of a text below the picture


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """A unit of time for an axis."""

    name: str
    seconds: float


_SECONDS = _Unit(name="seconds", seconds=1)


def unit_of(seconds: float) -> _Unit:
    """Return the unit in which such a duration is easy to read."""
    if seconds > 3 * 3600:
        return _Unit(name="hours", seconds=3600)
    return _Unit(name="minutes", seconds=60) if seconds > 600 else _SECONDS


def draw_png(analysis: Analysis, path: str) -> None:
    """Write the picture: the whole run and, in a long one, the time around its last failure.

    Raises:
        OSError: the file can't be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timeline, failures = analysis.timeline, analysis.failures
    goodput = analysis.summary.accounting.goodput
    whole = unit_of((timeline.end_ns - timeline.begin_ns) / 1e9)
    texts = _texts(failures, whole)
    grids = [rasterize(timeline, edges_ns(begin, end, _COLUMNS)) for begin, end in _stretches(analysis)]
    rows_in = float(np.clip(0.35 * len(grids[0].ranks), 1.2, 7.5 if len(grids) == 1 else 4.5))
    below_in = 0.3 + 0.2 * len(texts)
    height_in = _TITLE_IN + len(grids) * (rows_in + _AROUND_IN) + below_in
    # not pyplot: no global state, and no display is looked for
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=_DPI)
    FigureCanvasAgg(figure)
    for index, grid in enumerate(grids):
        bottom_in = height_in - _TITLE_IN - (index + 1) * (rows_in + _AROUND_IN) + _AROUND_IN - 0.4
        axes = figure.add_axes((0.06, bottom_in / height_in, 0.79, rows_in / height_in))
        unit = unit_of((int(grid.edges_ns[-1]) - timeline.begin_ns) / 1e9) if not index else _SECONDS
        _draw_grid(axes, grid, timeline, unit)
        _draw_cycles(axes, grid, timeline, unit)
        _draw_faults(axes, grid, timeline, failures, unit)
        if index:
            axes.set_title(f"around failure {failures[-1].number}", loc="right", fontsize=11, weight="bold")
        else:
            _draw_legend(axes, grids, timeline, has_faults=bool(failures))
    share = "" if goodput is None else f", goodput {goodput.share:.1%}"
    figure.text(0.06, 1 - 0.32 / height_in, _escaped(theme.title(timeline) + share), fontsize=14, weight="bold")
    for index, text in enumerate(texts):
        figure.text(0.06, (below_in - 0.25 - 0.2 * index) / height_in, _escaped(text), fontsize=9.5, color="#333333")
    figure.savefig(path, format="png")


def _stretches(analysis: Analysis) -> list[tuple[int, int]]:
    """Return the stretches to show: the run, and the last failure if it is small in comparison."""
    timeline, windows = analysis.timeline, analysis.windows
    found = [(timeline.begin_ns, timeline.end_ns)]
    if windows and _SMALL * (windows[-1].end_ns - windows[-1].begin_ns) < timeline.end_ns - timeline.begin_ns:
        found.append((windows[-1].begin_ns, windows[-1].end_ns))
    return found


def _draw_grid(axes: Axes, grid: Grid, timeline: Timeline, unit: _Unit) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import MaxNLocator

    colors = theme.colors(len(timeline.names))
    left, right = _at(grid.edges_ns[0], timeline, unit), _at(grid.edges_ns[-1], timeline, unit)
    rows = len(grid.ranks)
    axes.imshow(
        grid.states,
        cmap=ListedColormap(colors),
        vmin=-0.5,
        vmax=len(colors) - 0.5,
        aspect="auto",
        interpolation="nearest",
        extent=(left, right, rows - 0.5, -0.5),
    )
    if rows <= 64:
        for row in range(1, rows):
            axes.axhline(row - 0.5, color=theme.BACKGROUND, linewidth=2.0 if rows <= 16 else 0.5)
    axes.set_xlabel(f"{unit.name} since the start of the run", fontsize=11)
    axes.set_ylabel("rank", fontsize=11)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=16, integer=True, min_n_ticks=1))
    # rows are ranks in order; if numbers are missing, a row isn't the rank's number
    axes.yaxis.set_major_formatter(lambda row, _: str(grid.ranks[int(row)]) if 0 <= row < rows else "")
    axes.set_xlim(left, right)
    axes.set_ylim(rows - 0.5, -0.5)


def _at(at_ns: int, timeline: Timeline, unit: _Unit) -> float:
    return (int(at_ns) - timeline.begin_ns) / 1e9 / unit.seconds


def _draw_cycles(axes: Axes, grid: Grid, timeline: Timeline, unit: _Unit) -> None:
    """Draw a line where a cycle begins, with its number above if there is room."""
    begin_ns, end_ns = int(grid.edges_ns[0]), int(grid.edges_ns[-1])
    free_from = -1.0
    for cycle in timeline.cycles:
        place = (cycle.begin_ns - begin_ns) / (end_ns - begin_ns)
        if not 0 <= place <= 1:
            continue
        at = _at(cycle.begin_ns, timeline, unit)
        axes.axvline(at, color="black", linewidth=1.2, linestyle="--")
        if place < free_from:
            continue
        free_from = place + 0.055
        axes.annotate(
            f"cycle {cycle.number}",
            (at, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(3, 4),
            textcoords="offset points",
            fontsize=10,
            annotation_clip=False,
        )


def _draw_faults(axes: Axes, grid: Grid, timeline: Timeline, failures: Sequence[Failure], unit: _Unit) -> None:
    """Draw a numbered mark at each failure; the texts are below the picture."""
    for rank, since_s, until_s in theme.hung_lines(timeline, failures):
        line = [grid.ranks.index(rank)] * 2
        axes.plot(
            [since_s / unit.seconds, until_s / unit.seconds],
            line,
            color=theme.FAULT,
            linewidth=3,
            zorder=9,
            solid_capstyle="butt",
        )
    begin_s, end_s = ((int(edge) - timeline.begin_ns) / 1e9 for edge in (grid.edges_ns[0], grid.edges_ns[-1]))
    for each in failures:
        if not begin_s <= each.at_s <= end_s:
            continue
        row = grid.ranks.index(each.rank) if each.rank in grid.ranks else 0
        axes.plot(
            [each.at_s / unit.seconds],
            [row],
            marker="o",
            markersize=15,
            markerfacecolor=theme.BACKGROUND,
            markeredgecolor=theme.FAULT,
            markeredgewidth=2.2,
            clip_on=False,
            zorder=10,
        )
        axes.annotate(
            str(each.number),
            (each.at_s / unit.seconds, row),
            color=theme.FAULT,
            weight="bold",
            fontsize=10,
            ha="center",
            va="center",
            annotation_clip=False,
            zorder=11,
        )


def _draw_legend(axes: Axes, grids: Sequence[Grid], timeline: Timeline, *, has_faults: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names, colors = state_names(timeline.names), theme.colors(len(timeline.names))
    states = np.unique(np.concatenate([grid.states.ravel() for grid in grids]))
    seen = [int(state) for state in states if state != ABSENT]
    entries: list[Any] = [
        Patch(facecolor=colors[state], edgecolor="#888888", label=_escaped(_shorten(names[state], 24)))
        for state in seen
    ]
    if has_faults:
        style: dict[str, Any] = {"markerfacecolor": theme.BACKGROUND, "markeredgecolor": theme.FAULT}
        entries.append(Line2D([], [], marker="o", linestyle="", markersize=10, label="failure, see below", **style))
    entries.append(Line2D([], [], color="black", linestyle="--", label="a cycle begins"))
    axes.legend(handles=entries, loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False, fontsize=10)


def _texts(failures: Sequence[Failure], unit: _Unit) -> list[str]:
    lines: list[str] = []
    if len(failures) > _MOST_TEXTS:
        lines.append(f"{len(failures) - _MOST_TEXTS} earlier failures: see the report's tables")
    for each in failures[-_MOST_TEXTS:]:
        when = f"{each.at_s / unit.seconds:.2f} {unit.name}"
        text = f"({each.number})  cycle {each.cycle}, after {when}: {' '.join(each.text.split())}"
        lines += textwrap.wrap(_shorten(text, 3 * _LINE), _LINE, subsequent_indent="        ")
    return lines


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _escaped(text: str) -> str:
    """Escape a text: matplotlib takes what is between two dollars for a formula."""
    return plain(text).replace("$", r"\$")
