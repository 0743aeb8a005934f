"""The tables of `megatron-ft report`, for the terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

from megatron_ft.cli.render.terminal import add_rows, plain, terminal, took
from megatron_ft.core.board.intervals import FIRST_INTERVALS
from megatron_ft.core.facts.launcher import PHASES
from megatron_ft.core.wording import counted, listed, when

if TYPE_CHECKING:
    from rich.table import Table

    from megatron_ft.cli.analysis.analysis import Analysis
    from megatron_ft.cli.analysis.interval_lengths import LoggedInterval
    from megatron_ft.cli.analysis.run_summary import RunSummary
    from megatron_ft.cli.analysis.slow_rank_summary import SlowRankSummary
    from megatron_ft.core.facts.reported_hang import ReportedHang
    from megatron_ft.records.rules.accounting import CycleSummary, Goodput

CYCLE_COLUMNS = ("cycle", "how it ended", "rank", "detected\nafter", "training\nagain after", "iterations\nredone")
INTERVAL_COLUMNS = ("section", "timeout", "longest", "of rank", "median", "99 %", "observed", "hangs", "margin")
SLOW_COLUMNS = (
    "slow rank",
    "node",
    "cycle",
    "named after",
    "lasted",
    "others wait\nfor it",
    "takes longer in",
    "on average",
    "on others",
)
HANG_COLUMNS = ("rank", "section", "cycle", "for", "and then", "what was found")
TIMES = (
    "Detected after: from the fault. Training again after: from the detection to the end of the first step. Redone are "
    "iterations that had been finished before."
)
GOODPUT = "Goodput is the share of productive steps in the time from the start of the launchers to their end."
SHOWN_S = 0.005
_TIGHT = 1.5  # as the update rules of the learned timeouts: less room than this isn't much


def cycle_row(cycle: CycleSummary) -> tuple[str, ...]:
    """Return the cells of one cycle, in the order of ``CYCLE_COLUMNS``; a dash is unknown."""
    return (
        str(cycle.cycle),
        _how(cycle),
        _or_dash(cycle.cause.rank if cycle.cause else None),
        took(cycle.noticed_after_s),
        took(cycle.training_again_after_s),
        _or_dash(cycle.iterations_redone),
    )


def hang_row(hang: ReportedHang) -> tuple[str, ...]:
    """Return the cells of one reported hang, in the order of ``HANG_COLUMNS``; a dash is unknown."""
    went_on = "went on" if hang.went_on else "not restarted"
    return (_or_dash(hang.rank), hang.section, str(hang.cycle), took(hang.seconds), went_on, hang.text)


def print_run(run: RunSummary, file: TextIO | None = None) -> None:
    """Print the table of one run, with a line on the meaning of its times."""
    console = terminal(file)
    console.print(_cycles_table(run))
    if any(cycle.noticed_after_s is not None for cycle in run.cycles):
        console.print(TIMES)
    restores = [cycle for cycle in run.cycles if cycle.restored is not None]
    if restores:
        known = [cycle.restored_redone for cycle in restores if cycle.restored_redone is not None]
        redone = f", {counted(sum(known), 'iteration')} redone" if known else ""
        console.print(f"{counted(len(restores), 'cycle')} restored from memory{redone}.")
    if run.accounting.hangs:
        console.print()
        table = _table("hangs that were reported, and ended no rank", HANG_COLUMNS, left="what was found")
        add_rows(table, map(hang_row, run.accounting.hangs))
        console.print(table)
    phases = _phases_table(run)
    if phases is not None:
        console.print()
        console.print(phases)
    if run.missing_ranks:
        console.print(_missing(run.missing_ranks, run.world_size or 0), markup=False)
    if run.passed_over:
        console.print(f"{run.passed_over} lines of the event logs couldn't be read, or not wholly.")


def _table(title: str, columns: Iterable[str], *, left: str = "") -> Table:
    """Return an empty table whose columns are right-aligned except ``left``."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title, style="bold"), title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == left else "right")
    return table


def _cycles_table(run: RunSummary) -> Table:
    opened = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.begin_ns / 1e9))
    ranks = "" if run.world_size is None else f", {run.world_size} ranks"
    title = f"job {plain(run.run_id)}, run of {opened}{ranks}"
    title = f"{title}, {counted(run.restarts, 'restart')}{_nodes(run.hosts)}"
    table = _table(title, CYCLE_COLUMNS, left="how it ended")
    add_rows(table, map(cycle_row, run.cycles))
    return table


def _nodes(hosts: Sequence[str]) -> str:
    return f", on {counted(len(hosts), 'node')} ({listed([*map(plain, hosts)])})" if hosts else ""


def _missing(ranks: Sequence[int], size: int) -> str:
    """Return a line on missing logs, and how to include them."""
    shown = listed([*map(str, ranks)])
    return (
        f"Of {counted(size, 'rank')}, the logs of {len(ranks)} aren't here (rank {shown}): what their nodes did isn't "
        "in this report. Name the log directories of all nodes."
    )


def _phases_table(run: RunSummary) -> Table | None:
    restarts = [cycle for cycle in run.cycles if cycle.phases]
    if not restarts:
        return None
    names = list(dict.fromkeys(name for name in PHASES if any(name in cycle.phases for cycle in restarts)))
    table = _table("where the time of each restart went", ("cycle", *(name.replace(" ", "\n") for name in names)))
    for cycle in restarts:
        seconds = (took(cycle.phases.get(name)) for name in names)
        add_rows(table, [(f"{cycle.cycle} to {cycle.cycle + 1}", *seconds)])
    return table


def _how(cycle: CycleSummary) -> str:
    cause = cycle.cause
    if cause is not None and cause.text:
        where = "" if cycle.iteration is None else when(cycle.iteration)
        text = cause.text if where in cause.text else f"{cause.text} {where}"
        return f"{text},\n{cause.detail}" if cause.detail else text
    if cycle.outcome == "succeeded":
        return "finished"
    return "no end in the logs" if cycle.outcome == "unknown" else cycle.outcome


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def goodput_line(goodput: Goodput | None) -> str:
    """Return the goodput in one line; a dash is unknown."""
    if goodput is None:
        return "goodput -: no iterations were recorded"
    of = {each.value.replace("_", " "): seconds for each, seconds in goodput.seconds.items() if seconds >= SHOWN_S}
    parts = ", ".join(f"{name} {took(seconds)}" for name, seconds in of.items())
    return f"goodput {goodput.share:.1%} of {took(goodput.total_s)}, {steps_told(goodput)}: {parts}"


def steps_told(goodput: Goodput) -> str:
    """Return the number of iterations that counted, and of those that were done again."""
    redone = f", {goodput.redone} done twice" if goodput.redone else ""
    return f"{goodput.iterations} iterations that counted{redone}"


def interval_row(interval: LoggedInterval) -> tuple[str, ...]:
    """Return the cells of one timeout, in the order of ``INTERVAL_COLUMNS``; a dash is unknown."""
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


def slow_row(slow: SlowRankSummary) -> tuple[str, ...]:
    """Return the cells of one slow rank, in the order of ``SLOW_COLUMNS``; a dash is unknown."""
    return (
        str(slow.rank),
        slow.node,
        str(slow.cycle),
        took(slow.after_s),
        took(slow.lasted_s),
        f"{slow.lag:.0%}",
        slow.section or "-",
        took(slow.section_s),
        took(slow.others_s),
    )


def interval_notes(analysis: Analysis) -> list[str]:
    """Return notes to print below the table."""
    notes = []
    for interval in analysis.intervals:
        if interval.left_out_s is not None and interval.left_out_s > (interval.longest_s or 0):
            notes.append(
                f"{interval.name} is without the first {FIRST_INTERVALS} of each cycle (at most "
                f"{took(interval.left_out_s)}), to which a longer timeout may apply."
            )
        if interval.known < 1:
            notes.append(
                f"{interval.name} rests on {interval.known:.0%} of the time: after a loss of events it isn't known "
                "which sections were open."
            )
    return notes


def print_analysis(analysis: Analysis, file: TextIO | None = None) -> None:
    """Print everything after the tables of the cycles."""
    console = terminal(file)
    console.print(goodput_line(analysis.summary.accounting.goodput), markup=False)
    if analysis.slow_ranks:
        console.print()
        table = _table("ranks that held the others back", SLOW_COLUMNS, left="takes longer in")
        add_rows(table, map(slow_row, analysis.slow_ranks))
        console.print(table)
    if analysis.intervals:
        console.print()
        table = _table("timeouts beside the observed intervals", INTERVAL_COLUMNS, left="section")
        for interval in analysis.intervals:
            tight = interval.margin is not None and interval.margin < _TIGHT
            add_rows(table, [interval_row(interval)], style="red" if tight else "")
        console.print(table)
        for note in interval_notes(analysis):
            console.print(note, markup=False)
    lost = analysis.timeline.lost
    if lost:
        console.print(f"{lost} events were overwritten before a monitor read them; spans around them are left out.")
