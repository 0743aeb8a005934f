"""The cycles of a run as a table for the terminal; needs the package's extra `report` (rich)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, TextIO

from megatron_ft.cli.render.terminal import plain, terminal
from megatron_ft.core.wording import counted, listed, when

if TYPE_CHECKING:
    from rich.table import Table

    from megatron_ft.cli.analysis.cycles import CycleSummary, RestartPhases, RunSummary

__all__ = ["COLUMNS", "add_rows", "cycle_row", "phases_row", "print_run", "took"]

COLUMNS = ("cycle", "how it ended", "rank", "detected\nafter", "training\nagain after", "iterations\nredone")


def cycle_row(cycle: CycleSummary) -> tuple[str, ...]:
    """The cells of one cycle, in the order of ``COLUMNS``; what isn't known is a dash."""
    return (
        str(cycle.cycle),
        _how(cycle),
        _or_dash(cycle.rank),
        took(cycle.noticed_after_s),
        took(cycle.training_again_after_s),
        _or_dash(cycle.iterations_redone),
    )


def phases_row(cycle: CycleSummary) -> tuple[str, ...] | None:
    """Where the time went between the fault of this cycle and the end of the next one's first step.

    In the order of ``RestartPhases``; None if no restart followed.
    """
    durations = [getattr(cycle.phases, name) for name in _names(cycle.phases)]
    if all(seconds is None for seconds in durations[2:]):
        return None
    return (f"{cycle.cycle} to {cycle.cycle + 1}", *map(took, durations))


def print_run(run: RunSummary, file: TextIO | None = None) -> None:
    """Draw the table of one run, with a line on what its times mean.

    Raises:
        ConfigError: rich is missing.
    """
    console = terminal(file)
    console.print(_table(run))
    if any(cycle.noticed_after_s is not None for cycle in run.cycles):
        console.print("Times count from the fault; redone are iterations that had been finished before it.")
    phases = _phases_table(run)
    if phases is not None:
        console.print()
        console.print(phases)
    if run.missing_ranks:
        console.print(_missing(run.missing_ranks, run.world_size or 0), markup=False)
    if run.passed_over:
        console.print(f"{run.passed_over} lines of the event logs couldn't be read, or not wholly.")


def _table(run: RunSummary) -> Table:
    from rich.table import Table
    from rich.text import Text

    opened = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.opened_wall_ns / 1e9))
    ranks = "" if run.world_size is None else f", {run.world_size} ranks"
    title = f"job {plain(run.run_id)}, run of {opened}{ranks}"
    title = f"{title}, {counted(run.restarts, 'restart')}{_nodes(run.hosts)}"
    table = Table(title=Text(title), title_justify="left", title_style="bold")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "how it ended" else "right")
    add_rows(table, map(cycle_row, run.cycles))
    return table


def _nodes(hosts: Sequence[str]) -> str:
    return f", on {counted(len(hosts), 'node')} ({listed([*map(plain, hosts)])})" if hosts else ""


def _missing(ranks: Sequence[int], size: int) -> str:
    """What this report can't tell, and how it could."""
    shown = listed([*map(str, ranks)])
    return (
        f"Of {counted(size, 'rank')}, the logs of {len(ranks)} aren't here (rank {shown}): what their nodes did isn't "
        "in this report. Name the log directories of all nodes."
    )


def _phases_table(run: RunSummary) -> Table | None:
    from rich.table import Table

    rows = [row for row in map(phases_row, run.cycles) if row is not None]
    if not rows:
        return None
    table = Table(title="where the time of each restart went", title_justify="left", title_style="bold")
    for column in ("cycle", *(name.replace("_", "\n") for name in _names(run.cycles[0].phases))):
        table.add_column(column, justify="right")
    add_rows(table, rows)
    return table


def add_rows(table: Table, rows: Iterable[Sequence[str]], style: str = "") -> None:
    """Add rows of texts that may come from anywhere."""
    from rich.text import Text

    for row in rows:
        table.add_row(*(Text(plain(cell, keep_lines=True), style=style) for cell in row))


def _names(phases: RestartPhases) -> list[str]:
    return [field.name for field in fields(phases)]


def _how(cycle: CycleSummary) -> str:
    if cycle.text:
        where = "" if cycle.iteration is None else when(cycle.iteration)
        text = cycle.text if where in cycle.text else f"{cycle.text} {where}"
        return f"{text},\n{cycle.detail}" if cycle.detail else text
    if cycle.outcome == "succeeded":
        return "finished"
    return "no end in the logs" if cycle.outcome == "unknown" else cycle.outcome


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def took(seconds: float | None) -> str:
    """Milliseconds below one second; a dash for None."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2f} s"
