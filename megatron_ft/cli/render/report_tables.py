"""The report as texts: its tables, for the terminal and the page alike, and its lines on the terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_ft.cli.analysis.analysis import Analysis
from megatron_ft.cli.base.terminal import terminal, took
from megatron_ft.link.base.intervals import FIRST_INTERVALS
from megatron_ft.link.base.wording import counted, listed, printable, when
from megatron_ft.link.facts.launcher import PHASES
from megatron_ft.records.rules.accounting import CycleSummary, Goodput

GOODPUT = "Goodput is the share of productive steps in the time from the start of the launchers to their end."
SHOWN_S = 0.005
_TIMES = (
    "Detected after: from the fault. Training again after: from the detection to the end of the first step. Redone are "
    "iterations that had been finished before."
)
_MARGIN = (
    "The margin is how many times the longest observed interval fits into the timeout. A section that never ended (its "
    "rank hung, was ended, or died) is no observed interval."
)
_TIGHT = 1.5  # as the update rules of the learned timeouts: less room than this isn't much


class Sheet(NamedTuple):
    """A table; a dash is unknown.

    Args:
        text: heading of the column of texts, which may be long.
        marked: numbers of the rows that are bad news.
        notes: lines below it.
    """

    name: str
    title: str
    columns: Sequence[str]
    text: str
    rows: Sequence[Sequence[str]]
    marked: Sequence[int] = ()
    notes: Sequence[str] = ()


def header(analysis: Analysis) -> str:
    """Return the job, on what it ran, and how often it was restarted."""
    run = analysis.run
    size = len(analysis.timeline.ranks) if run.world_size is None else run.world_size
    where = f"{counted(size, 'rank')} on {counted(len(run.hosts), 'node')} ({listed([*map(printable, run.hosts)])})"
    code = "" if run.exit_code is None else f", exit code {run.exit_code}"
    return f"{printable(run.name)}: {where}, {counted(run.restarts, 'restart')}{code}"


def period(analysis: Analysis) -> str:
    """Return when the job ran."""
    timeline = analysis.timeline
    began, ended = (time.localtime(at_ns / 1e9) for at_ns in (timeline.begin_ns, timeline.end_ns))
    until = time.strftime("%H:%M:%S" if began[:3] == ended[:3] else "%Y-%m-%d %H:%M:%S", ended)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', began)} to {until} ({took(timeline.since(None))})"


def goodput_line(goodput: Goodput | None) -> str:
    """Return the goodput in one line; a dash is unknown."""
    if goodput is None:
        return "goodput -: no iterations were recorded"
    of = {each.value.replace("_", " "): seconds for each, seconds in goodput.seconds.items() if seconds >= SHOWN_S}
    parts = ", ".join(f"{name} {took(seconds)}" for name, seconds in of.items())
    redone = f", {goodput.redone} done twice" if goodput.redone else ""
    told = f"{goodput.iterations} iterations that counted{redone}"
    return f"goodput {goodput.share:.1%} of {took(goodput.total_s)}, {told}: {parts}"


def sheets(analysis: Analysis) -> Iterator[Sheet]:
    """Yield the tables that have rows."""
    yield from (
        sheet
        for sheet in (_cycles(analysis), _hangs(analysis), _phases(analysis), _slow(analysis), _timeouts(analysis))
        if sheet.rows
    )


def _cycles(analysis: Analysis) -> Sheet:
    cycles = analysis.run.cycles
    rows = [
        (
            str(cycle.cycle),
            _how(cycle),
            _or_dash(cycle.cause.rank if cycle.cause else None),
            took(cycle.noticed_after_s),
            took(cycle.training_again_after_s),
            _or_dash(cycle.iterations_redone),
        )
        for cycle in cycles
    ]
    notes = [_TIMES] if any(cycle.noticed_after_s is not None for cycle in cycles) else []
    restores = sum(cycle.restored is not None for cycle in cycles)
    notes += [f"{counted(restores, 'cycle')} restored from memory."] if restores else []
    columns = ("cycle", "how it ended", "rank", "detected\nafter", "training\nagain after", "iterations\nredone")
    failed = [at for at, cycle in enumerate(cycles) if cycle.outcome == "failed"]
    return Sheet("cycles", "cycles", columns, "how it ended", rows, failed, notes)


def _how(cycle: CycleSummary) -> str:
    cause = cycle.cause
    if cause is not None and cause.text:
        where = "" if cycle.iteration is None else when(cycle.iteration)
        text = cause.text if where in cause.text else f"{cause.text} {where}"
        return f"{text},\n{cause.detail}" if cause.detail else text
    return {"succeeded": "finished", "unknown": "no end in the logs"}.get(cycle.outcome, cycle.outcome)


def _hangs(analysis: Analysis) -> Sheet:
    rows = [
        (
            _or_dash(hang.rank),
            hang.section,
            str(hang.cycle),
            took(hang.seconds),
            "went on" if hang.went_on else "not restarted",
            hang.text,
        )
        for hang in analysis.run.accounting.hangs
    ]
    columns = ("rank", "section", "cycle", "for", "and then", "what was found")
    return Sheet("hangs", "hangs that were reported, and ended no rank", columns, "what was found", rows)


def _phases(analysis: Analysis) -> Sheet:
    restarts = [cycle for cycle in analysis.run.cycles if cycle.phases]
    names = [name for name in dict.fromkeys(PHASES) if any(name in cycle.phases for cycle in restarts)]
    rows = [
        (f"{cycle.cycle} to {cycle.cycle + 1}", *(took(cycle.phases.get(name)) for name in names)) for cycle in restarts
    ]
    columns = ("cycle", *(name.replace(" ", "\n") for name in names))
    return Sheet("phases", "where the time of each restart went", columns, "", rows)


def _slow(analysis: Analysis) -> Sheet:
    rows = [
        (
            str(slow.rank),
            slow.node,
            str(slow.cycle),
            took(slow.after_s),
            took(slow.lasted_s),
            f"{slow.lag:.0%}",
        )
        for slow in analysis.slow_ranks
    ]
    columns = ("slow rank", "node", "cycle", "named after", "lasted", "others wait\nfor it")
    return Sheet("slow", "ranks that held the others back", columns, "node", rows)


def _timeouts(analysis: Analysis) -> Sheet:
    rows, tight, notes = [], [], [_MARGIN]
    for at, each in enumerate(analysis.intervals):
        rows.append(
            (
                each.name,
                took(each.timeout_s),
                took(each.longest_s),
                _or_dash(each.longest_rank),
                took(each.quantile(0.5)),
                took(each.quantile(0.99)),
                str(each.count),
                str(each.hangs),
                "-" if each.margin is None else f"{each.margin:.1f} x",
                took(each.suggested_s),
            )
        )
        tight += [at] if each.margin is not None and each.margin < _TIGHT else []
        if each.left_out_s is not None and each.left_out_s > (each.longest_s or 0):
            notes.append(
                f"{each.name} is without the first {FIRST_INTERVALS} of each cycle (at most {took(each.left_out_s)}), "
                "to which a longer timeout may apply."
            )
    columns = ("section", "timeout", "longest", "of rank", "median", "99 %", "observed", "hangs", "margin", "suggested")
    return Sheet("timeouts", "timeouts beside the observed intervals", columns, "section", rows, tight, notes)


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def print_report(analysis: Analysis) -> None:
    """Print the tables of one run, and what its logs lack."""
    from rich.table import Table
    from rich.text import Text

    console, run = terminal(), analysis.run
    console.print(Text(header(analysis), style="bold"))
    console.print(period(analysis), goodput_line(run.accounting.goodput), sep=", ", markup=False)
    for sheet in sheets(analysis):
        console.print()
        table = Table(title=Text(sheet.title, style="bold"), title_justify="left")
        for column in sheet.columns:
            table.add_column(column, justify="left" if column == sheet.text else "right")
        for at, row in enumerate(sheet.rows):
            style = "red" if at in sheet.marked and sheet.name == "timeouts" else ""
            table.add_row(*(Text("\n".join(map(printable, cell.split("\n"))), style=style) for cell in row))
        console.print(table)
        for note in sheet.notes:
            console.print(note, markup=False)
    if run.missing_ranks:
        shown = listed([*map(str, run.missing_ranks)])
        console.print(
            f"Of {counted(run.world_size or 0, 'rank')}, the logs of {len(run.missing_ranks)} aren't here (rank "
            f"{shown}): what their nodes did isn't in this report. Name the log directories of all nodes.",
            markup=False,
        )
    if run.passed_over:
        console.print(f"{run.passed_over} lines of the event logs couldn't be read, or not wholly.")
    lost = analysis.timeline.lost
    if lost:
        console.print(f"{lost} events were overwritten before a monitor read them; spans around them are left out.")
