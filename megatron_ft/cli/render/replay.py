"""Results of a replay: a table, and a picture (matplotlib, of the extra `report`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

import numpy as np

from megatron_ft.cli.analysis.intervals import Floats, lengths_of
from megatron_ft.cli.analysis.replay import Hung, Replayed
from megatron_ft.cli.analysis.timeline import Timeline
from megatron_ft.cli.render.terminal import plain, terminal, took

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = ("section", "timeout at the end", "judged", "too early to judge", "would have been terminated", "too long")
_SHOWN = 8
_COLORS = ("#c1121f", "#4e79a7", "#59a14f")
_STYLES = ("-", "--", ":")
_WIDTH_IN, _ROW_IN = 10.0, 2.3
_MOST_ROWS = 8
_DPI = 130


def print_replay(title: str, found: Sequence[Replayed], file: TextIO | None = None) -> None:
    """Print a table, and a line for each rank that would have been ended wrongly and for each hang."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "section" else "right")
    for each in found:
        cells = (each.judged, each.unjudged, f"in {len(each.would_end)} cycles" if each.would_end else "-")
        table.add_row(Text(plain(each.name)), took(each.last_s), *map(str, cells), str(each.too_long or "-"))
    console = terminal(file)
    console.print(table)
    for line in lines_of(found):
        console.print(Text(line))


def lines_of(found: Sequence[Replayed]) -> list[str]:
    """Return the table's counts in words."""
    lines = []
    for each in found:
        for end in each.would_end[:_SHOWN]:
            lines.append(
                f"wrongly: cycle {end.cycle}, rank {end.rank}: '{plain(each.name)}' took {took(end.took_s)}, "
                f"the timeout would have been {took(end.timeout_s)}"
            )
        if len(each.would_end) > _SHOWN:
            lines.append(f"wrongly: '{plain(each.name)}' in {len(each.would_end) - _SHOWN} more cycles")
        lines += [
            f"hang: cycle {h.cycle}, rank {h.rank}: '{plain(each.name)}' {_of_hang(h)}" for h in each.hangs[:_SHOWN]
        ]
    return lines


def _of_hang(hang: Hung) -> str:
    was = f"was detected after {took(hang.noticed_s)}"
    if hang.would_s is None:
        return f"{was}, and would not have been: no timeout was learned yet"
    difference = hang.noticed_s - hang.would_s
    return f"{was}, and would have been after {took(hang.would_s)}: {took(abs(difference))} " + (
        "sooner" if difference >= 0 else "later"
    )


def draw_replay(timelines: Sequence[Timeline], found: Mapping[str, Sequence[Replayed]], path: str) -> None:
    """Draw a row for each section: the share of longer intervals, and each rule's timeout at the end.

    Raises:
        OSError: the file can't be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [each.name for each in next(iter(found.values()))]
    lengths = {name: lengths_of(timelines, name) for name in names}
    shown = [name for name in names if len(lengths[name][0])][:_MOST_ROWS]
    # not pyplot: no global state, and no display is looked for
    figure = Figure(figsize=(_WIDTH_IN, 0.6 + _ROW_IN * max(1, len(shown))), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(max(1, len(shown)), 1, squeeze=False)[:, 0]
    for axes, name in zip(rows, shown, strict=False):
        timeouts = {rule: next((e.last_s for e in each if e.name == name), None) for rule, each in found.items()}
        _draw(axes, name, *lengths[name], timeouts)
    figure.savefig(path, format="png")


def _draw(axes: Axes, name: str, took_s: Floats, counts: Floats, timeouts: Mapping[str, float | None]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    count = round(counts.sum())
    longer = np.cumsum(counts[::-1])[::-1] / count
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
