"""Goodput, and the timeouts beside the observed intervals, for the terminal; needs rich (the extra `report`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from megatron_ft.cli.analysis.analysis import Analysis
from megatron_ft.cli.analysis.goodput import Goodput
from megatron_ft.cli.analysis.intervals import Interval
from megatron_ft.cli.render.cycles_table import add_rows, took
from megatron_ft.cli.render.terminal import terminal

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["INTERVAL_COLUMNS", "goodput_line", "interval_notes", "interval_row", "print_analysis"]

INTERVAL_COLUMNS = ("section", "timeout", "longest", "of rank", "median", "99 %", "observed", "hangs", "margin")
_TIGHT = 1.5  # as the update rules of the learned timeouts: less room than this isn't much


def goodput_line(goodput: Goodput | None) -> str:
    """One line; a dash where it isn't known."""
    if goodput is None:
        return "goodput -: no iterations were recorded"
    redone = "" if not goodput.redone else f", {took(goodput.redone_s)} in {goodput.redone} done twice"
    return (
        f"goodput {goodput.share:.1%}: of {took(goodput.wall_s)}, {took(goodput.counted_s)} in "
        f"{goodput.iterations} iterations that counted{redone}, {took(goodput.down_s)} in failures and restarts"
    )


def interval_row(interval: Interval) -> tuple[str, ...]:
    """The cells of one timeout, in the order of ``INTERVAL_COLUMNS``; what isn't known is a dash."""
    margin = interval.margin
    return (
        interval.name,
        took(interval.timeout_s),
        took(interval.longest_s),
        "-" if interval.longest_rank is None else str(interval.longest_rank),
        took(interval.median_s),
        took(interval.p99_s),
        str(interval.count),
        str(interval.hangs),
        "-" if margin is None else f"{margin:.1f} x",
    )


def interval_notes(analysis: Analysis) -> list[str]:
    """What the table doesn't say, to be read below it."""
    notes = []
    for interval in analysis.intervals:
        if interval.left_out_s is not None and interval.left_out_s > (interval.longest_s or 0):
            notes.append(
                f"{interval.name} is without the time from a rank's first iteration to its first 'step' "
                f"(at most {took(interval.left_out_s)}): with num_warmup_iters another timeout applies to it."
            )
        if interval.known < 1:
            notes.append(
                f"{interval.name} rests on {interval.known:.0%} of the time: after a loss of events it isn't known "
                "which sections were open."
            )
    return notes


def print_analysis(analysis: Analysis, file: TextIO | None = None) -> None:
    """Draw what comes after the tables of the cycles."""
    console = terminal(file)
    console.print(goodput_line(analysis.goodput), markup=False)
    if analysis.intervals:
        console.print()
        console.print(_table(analysis))
        for note in interval_notes(analysis):
            console.print(note, markup=False)
    lost = analysis.timeline.lost
    if lost:
        console.print(f"{lost} events were overwritten before a monitor read them; spans around them are left out.")


def _table(analysis: Analysis) -> Table:
    from rich.table import Table

    table = Table(title="timeouts beside the observed intervals", title_justify="left", title_style="bold")
    for index, column in enumerate(INTERVAL_COLUMNS):
        table.add_column(column, justify="right" if index else "left")
    for interval in analysis.intervals:
        tight = interval.margin is not None and interval.margin < _TIGHT
        add_rows(table, [interval_row(interval)], style="red" if tight else "")
    return table
