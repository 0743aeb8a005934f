"""Figures of the page, with plotly: the timeline, and durations of sections.

Plotly interprets tags and entities in its texts: texts from a log go through ``escape``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from megatron_ft.cli.analysis.analysis import Analysis
from megatron_ft.cli.analysis.failures import Window
from megatron_ft.cli.analysis.intervals import Floats, LoggedInterval, lengths_of
from megatron_ft.cli.analysis.raster import ABSENT, Grid, edges_ns, rasterize, state_names
from megatron_ft.cli.analysis.replay import LearnedRule, replay
from megatron_ft.cli.analysis.timeline import Timeline
from megatron_ft.cli.render import theme
from megatron_ft.cli.render.report_tables import interval_row
from megatron_ft.cli.render.terminal import took
from megatron_ft.core.config.config import ConfigValues
from megatron_ft.core.timeouts.budget_rule import REFERENCE

COARSE = "coarse"
"""``meta`` of the trace that the page hides when zoomed in."""

_MOST_CELLS, _MOST_COLUMNS, _LEAST_COLUMNS = 1_500_000, 20_000, 600
_DETAIL_CELLS, _MOST_DETAIL_COLUMNS, _MOST_DETAILS = 400_000, 2000, 3
_SCREEN_COLUMNS = 900
_BINS = 80
_MOST_DISTRIBUTIONS = 16
_REFERENCE = "#2f6f6f"


def timeline_figure(analysis: Analysis) -> Any:
    """Return ranks over time, coloured by state; x axis: seconds since the beginning, y axis: rows of the grid."""
    from plotly import graph_objects

    figure = graph_objects.Figure()
    timeline = analysis.timeline
    ranks = timeline.ranks
    columns = int(np.clip(_MOST_CELLS // max(1, len(ranks)), _LEAST_COLUMNS, _MOST_COLUMNS))
    whole = rasterize(timeline, edges_ns(timeline.begin_ns, timeline.end_ns, columns))
    figure.add_trace(_heatmap(whole, timeline))
    seen = set(np.unique(whole.states).tolist())
    for window in analysis.windows[-_MOST_DETAILS:]:
        grid = _detail(timeline, window, whole)
        if grid is not None:
            seen |= set(np.unique(grid.states).tolist())
            figure.add_trace(_heatmap(grid, timeline))
    # on top, as many columns as a screen shows: a browser that has to drop columns drops arbitrary ones
    coarse = rasterize(timeline, edges_ns(timeline.begin_ns, timeline.end_ns, _SCREEN_COLUMNS))
    figure.add_trace(_heatmap(coarse, timeline, meta=COARSE))
    names, colors = state_names(timeline.names), theme.colors(len(timeline.names))
    for state in sorted(seen - {ABSENT}):
        # a heatmap has no legend: empty traces stand for its states
        marker = {"color": colors[state], "size": 14, "symbol": "square", "line": {"color": "#888", "width": 1}}
        figure.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name=escape(names[state]))
    _add_cycles(figure, timeline)
    _add_failures(figure, analysis)
    figure.update_layout(**_timeline_layout(timeline))
    return figure


def _detail(timeline: Timeline, window: Window, whole: Grid) -> Grid | None:
    """Return a finer grid around a failure; None if the whole is fine enough."""
    columns = int(np.clip(_DETAIL_CELLS // max(1, len(whole.ranks)), _LEAST_COLUMNS, _MOST_DETAIL_COLUMNS))
    edges = edges_ns(window.begin_ns, window.end_ns, columns)
    if 2 * (edges[1] - edges[0]) > whole.edges_ns[1] - whole.edges_ns[0]:
        return None
    return rasterize(timeline, edges)


def _heatmap(grid: Grid, timeline: Timeline, *, meta: str | None = None) -> Any:
    from plotly import graph_objects

    colors = theme.colors(len(timeline.names))
    count = len(colors)
    scale = [(edge / count, colors[index]) for index in range(count) for edge in (index, index + 1)]
    begin_s = (int(grid.edges_ns[0]) - timeline.begin_ns) / 1e9
    width_s = (int(grid.edges_ns[-1]) - int(grid.edges_ns[0])) / 1e9 / grid.states.shape[1]
    return graph_objects.Heatmap(
        z=grid.states,
        x0=begin_s + width_s / 2,
        dx=width_s,
        y0=0,
        dy=1,
        zmin=-0.5,
        zmax=count - 0.5,
        colorscale=scale,
        showscale=False,
        meta=meta,
        hoverinfo="none",  # shown by the page's own line, with the section's name
        ygap=2 if len(grid.ranks) <= 32 else 0,
    )


def _add_cycles(figure: Any, timeline: Timeline) -> None:
    rows = len(timeline.ranks)
    begins = [(cycle.begin_ns - timeline.begin_ns) / 1e9 for cycle in timeline.cycles]
    figure.add_scatter(
        x=[x for at in begins for x in (at, at, None)],
        y=[y for _ in begins for y in (-0.5, rows - 0.5, None)],
        mode="lines",
        line={"dash": "dash", "color": "black", "width": 1.5},
        name="a cycle begins",
        hoverinfo="skip",
    )
    for at, cycle in zip(begins, timeline.cycles, strict=True):
        figure.add_annotation(
            x=at, y=1, yref="paper", text=f"cycle {cycle.number}", showarrow=False, xanchor="left", yanchor="bottom"
        )


def _add_failures(figure: Any, analysis: Analysis) -> None:
    timeline, found = analysis.timeline, analysis.failures
    if not found:
        return
    rows = {rank: row for row, rank in enumerate(timeline.ranks)}
    for rank, since_s, until_s in theme.hung_lines(timeline, found):
        line = {"color": theme.FAULT, "width": 3}
        figure.add_scatter(
            x=[since_s, until_s], y=[rows[rank]] * 2, mode="lines", line=line, showlegend=False, hoverinfo="skip"
        )
    figure.add_scatter(
        x=[each.at_s for each in found],
        y=[rows.get(each.rank, 0) if each.rank is not None else 0 for each in found],
        mode="markers+text",
        name="failure (click it)",
        text=[str(each.number) for each in found],
        textfont={"color": theme.FAULT, "size": 12, "weight": "bold"},
        marker={"size": 22, "color": theme.BACKGROUND, "line": {"color": theme.FAULT, "width": 3}},
        hovertext=["<br>".join(textwrap.wrap(escape(f"cycle {each.cycle}: {each.text}")[:1000], 90)) for each in found],
        hoverinfo="text",
        customdata=[each.number for each in found],
        cliponaxis=False,
    )


def _timeline_layout(timeline: Timeline) -> dict[str, Any]:
    ranks = timeline.ranks
    rows = len(ranks)
    length = (timeline.end_ns - timeline.begin_ns) / 1e9
    yaxis: dict[str, Any] = {"title": "rank", "range": [rows - 0.5, -0.5], "showgrid": False, "zeroline": False}
    if ranks != list(range(rows)) or rows <= 16:
        step = max(1, rows // 16)
        yaxis |= {"tickvals": list(range(0, rows, step)), "ticktext": [str(rank) for rank in ranks[::step]]}
    return {
        "height": int(np.clip(180 + 30 * rows, 300, 760)),
        "margin": {"l": 70, "r": 20, "t": 40, "b": 60},
        "plot_bgcolor": theme.BACKGROUND,
        "xaxis": {
            "title": "seconds since the start of the run",
            "range": [0, length],
            "showgrid": False,
            "zeroline": False,
        },
        "yaxis": yaxis,
        "legend": {"itemclick": False, "itemdoubleclick": False},
        "dragmode": "zoom",
        "hovermode": "closest",
    }


def distributions_figure(analysis: Analysis) -> Any:
    """Return a histogram of each section's durations, with its timeout; None if nothing was observed.

    Includes what the rule of nvidia-resiliency-ext would have learned by the end of the run.
    """
    from plotly.subplots import make_subplots

    shown = [each for each in analysis.intervals if each.count][:_MOST_DISTRIBUTIONS]
    if not shown:
        return None
    factor = ConfigValues().safety_factor
    reference = {}
    for each in shown:
        rule = LearnedRule(REFERENCE, factor)
        replay([analysis.timeline], each.name, rule)
        reference[each.name] = rule.reference_s
    figure = make_subplots(
        rows=(len(shown) + 1) // 2,
        cols=2,
        subplot_titles=[_caption(each, reference[each.name]) for each in shown],
        vertical_spacing=0.45 / max(2, (len(shown) + 1) // 2),
    )
    for index, interval in enumerate(shown):
        row, column = index // 2 + 1, index % 2 + 1
        edges, counts = _histogram(*lengths_of([analysis.timeline], interval.name))
        figure.add_scatter(
            x=edges,
            y=[*counts, counts[-1]],
            line={"shape": "hv", "color": "#4e79a7", "width": 1.5},
            fill="tozeroy",
            name=escape(interval.name),
            row=row,
            col=column,
        )
        reference_s = reference[interval.name]
        for timeout_s, color, dash, whose in (
            (reference_s, _REFERENCE, "dot", "timeout by the reference's rule"),
            (interval.timeout_s, theme.FAULT, "dash", "timeout"),
        ):
            if timeout_s is not None:
                figure.add_scatter(
                    x=[timeout_s] * 2,
                    y=[0.5, 2 * max(counts)],
                    mode="lines",
                    line={"color": color, "dash": dash, "width": 2},
                    name=f"{whose} of {escape(interval.name)}",
                    row=row,
                    col=column,
                )
        figure.update_xaxes(type="log", title="seconds", dtick="D2", row=row, col=column)
        top = float(np.log10(2 * max(counts)))
        figure.update_yaxes(
            type="log", title="intervals", dtick=1, range=[float(np.log10(0.5)), top], row=row, col=column
        )
    height = 80 + 250 * ((len(shown) + 1) // 2)
    figure.update_layout(
        height=height, showlegend=False, margin={"l": 70, "r": 20, "t": 80, "b": 50}, plot_bgcolor="#f6f6f6"
    )
    return figure


def _caption(interval: LoggedInterval, reference_s: float | None) -> str:
    name, timeout, longest, *_, margin = interval_row(interval)
    name = name if len(name) <= 40 else name[:37] + "..."
    reference = "" if reference_s is None else f", by the reference's rule {took(reference_s)}"
    return f"<b>{escape(name)}</b>: longest {longest}, margin {margin}<br>timeout {timeout}{reference}"


def _histogram(seconds: Floats, weights: Floats) -> tuple[Sequence[float], list[float]]:
    """Return bins of equal ratio; a count of 0 becomes 0.5, the bottom of a logarithmic axis."""
    low, high = max(1e-6, float(seconds.min())), max(1e-6, float(seconds.max()))
    edges = np.geomspace(low * 0.97, high * 1.03, _BINS + 1)
    counts, _ = np.histogram(np.maximum(seconds, 1e-6), bins=edges, weights=weights)
    return edges.tolist(), np.maximum(counts, 0.5).tolist()
