"""How long sections took, and the timeouts beside it, as a picture; needs matplotlib (the extra `report`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_ft.cli.analysis.intervals import durations_s
from megatron_ft.cli.analysis.replay import Floats, Replayed
from megatron_ft.cli.analysis.timeline import Timeline
from megatron_ft.cli.render.terminal import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_replay"]

_COLORS = ("#c1121f", "#4e79a7", "#59a14f")
_STYLES = ("-", "--", ":")
_WIDTH_IN, _ROW_IN = 10.0, 2.3
_MOST = 8
_DPI = 130


def draw_replay(timelines: Sequence[Timeline], found: Mapping[str, Sequence[Replayed]], path: str) -> None:
    """A row for each section: the share of intervals that are longer, and each rule's timeout at the end.

    Raises:
        OSError: the file can't be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [each.name for each in next(iter(found.values()))]
    took = {name: np.sort(np.concatenate([durations_s(timeline, name) for timeline in timelines])) for name in names}
    shown = [name for name in names if len(took[name])][:_MOST]
    # not pyplot: nothing global is made, and no display is looked for
    figure = Figure(figsize=(_WIDTH_IN, 0.6 + _ROW_IN * max(1, len(shown))), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(max(1, len(shown)), 1, squeeze=False)[:, 0]
    for axes, name in zip(rows, shown, strict=False):
        timeouts = {rule: next((e.last_s for e in each if e.name == name), None) for rule, each in found.items()}
        _draw(axes, name, took[name], timeouts)
    figure.savefig(path, format="png")


def _draw(axes: Axes, name: str, took_s: Floats, timeouts: Mapping[str, float | None]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    count = len(took_s)
    longer = np.arange(count, 0, -1) / count
    axes.step(np.maximum(took_s, 1e-4), longer, where="pre", color="#333333", linewidth=1.2)
    axes.fill_between(np.maximum(took_s, 1e-4), longer, 1.0 / (2 * count), step="pre", color="#dddddd")
    for (rule, timeout_s), color, style in zip(timeouts.items(), _COLORS, _STYLES, strict=False):
        if timeout_s is not None:
            axes.axvline(timeout_s, color=color, linestyle=style, linewidth=1.6, label=f"{rule}: {timeout_s:.3g} s")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(1.0 / (2 * count), 1.3)
    for which in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        which(FuncFormatter(lambda seconds, _: f"{seconds:g}"))
    axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(which="both", labelsize=8)
    axes.set_ylabel("share longer")
    axes.set_title(f"{plain(name)}: {count:,} intervals, seconds".replace("$", r"\$"), loc="left", fontsize=10)
    if any(timeout_s is not None for timeout_s in timeouts.values()):
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(timeouts), fontsize=8, frameon=False)
    axes.grid(visible=True, which="major", color="#eeeeee")
