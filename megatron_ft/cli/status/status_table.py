"""The ranks of a running job as a table for the terminal.

Texts from outside (names of sections, errors) go through ``plain``: they may hold terminal control sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_ft.cli.base.terminal import plain
from megatron_ft.core.board.intervals import HangKind
from megatron_ft.core.signal_rules import signal_name
from megatron_ft.core.status.job_facts import JobFacts, JobPhase, RankRow, RankState, most_urgent
from megatron_ft.core.wording import counted

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

COLUMNS = {"rank": 4, "section": 24, "for": 11, "iteration": 9, "timeout used": 20, "state": 17}
"""Columns with their usual widths, so that nothing jumps from one drawing to the next."""
_ROOM_FOR_ALL = 120
_LONGEST_NAME = 20
_TABLE_LINES = 6
"""Lines of a table without its rows, with the line below it, and the cursor's line."""
_LEAST_ROWS = 3
_MANY = 0.8
_SOME = 0.5
_WORDS = {
    RankState.HUNG: ("hung, being terminated", "bold red"),
    RankState.DAMAGED: ("board damaged", "magenta"),
    RankState.STOPPED: ("process stopped", "bold yellow"),
    RankState.NOT_ATTACHED: ("not attached yet", "cyan"),
    RankState.CLOSING: ("monitoring ended", "dim"),
    RankState.PAUSED: ("paused", "yellow"),
    RankState.RUNNING: ("running", "green"),
}
_HEARTBEATS = {
    HangKind.INITIAL_HEARTBEAT.value: "first heartbeat",
    HangKind.HEARTBEAT.value: "heartbeat",
}
_PHASES = {
    JobPhase.STARTING: "starting",
    JobPhase.RUNNING: "running",
    JobPhase.RESTARTING: "ended, the next one is starting",
    JobPhase.ENDING: "ended, the job is ending",
}


def job_frame(facts: JobFacts, note: str | None, *, width: int, lines: int | None) -> Group:
    """Draw one job in this width and about ``lines`` lines (None: as many as needed).

    If there is no room for all ranks, those in trouble come first. ``note`` warns that the values may be out of date.
    """
    from rich.console import Group
    from rich.text import Text

    head = list(_head(facts, note))
    used = _TABLE_LINES + sum(1 + line.cell_len // width for line in head)
    shown = most_urgent(facts.ranks, len(facts.ranks) if lines is None else max(_LEAST_ROWS, lines - used))
    parts: list[Text | Table] = [*head]
    if shown:
        parts.append(_rank_table(shown, width=width))
    if len(shown) < len(facts.ranks):
        names = {row.rank for row in shown}
        hidden = [row for row in facts.ranks if row.rank not in names]
        most = max((row.timeout.share for row in hidden if row.timeout is not None), default=None)
        rest = "" if most is None else f", none of them beyond {_percent(most)} of its timeout"
        parts.append(Text(f"and {counted(len(hidden), 'more rank')}{rest}", style="dim"))
    return Group(*parts)


def duration(seconds: float) -> str:
    """Format seconds for a person: "0.4 s", "42 s", "3 min 20 s", "2 h 05 min", "3 d 4 h"."""
    if seconds < 10:
        return f"{int(seconds * 10) / 10:.1f} s"
    whole = int(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes == 0:
        return f"{whole} s"
    if hours == 0:
        return f"{minutes} min {whole % 60:02} s"
    return f"{hours} h {minutes % 60:02} min" if days < 2 else f"{days} d {hours % 24} h"


def _head(facts: JobFacts, note: str | None) -> Iterator[Text]:
    from rich.text import Text

    now_ns = facts.now_ns
    up = duration((now_ns - facts.started_ns) / 1e9)
    yield Text.assemble(
        (f"job {plain(facts.run_id)}", "bold"), f"  ft_launcher {facts.launcher_pid}, up {up}", overflow="fold"
    )
    yield Text(_cycle_and_ranks(facts, now_ns))
    if facts.paused_since_ns is not None:
        since = duration((now_ns - facts.paused_since_ns) / 1e9)
        yield Text(f"paused for {since}: hang detection is off until `megatron-ft resume`", style="yellow")
    if facts.observe_only:
        yield Text("observe-only: hung ranks are reported, not killed", style="yellow")
    if facts.last_cause is not None:
        yield Text(f"cycle {facts.last_cause.cycle} ended: {plain(facts.last_cause.text)}")
    if facts.goodput is not None:
        yield Text(f"goodput {facts.goodput:.1%}")
    for hang in facts.hangs:
        yield Text(plain(hang.line), style="dim" if hang.went_on else "bold red")
    for each in facts.slow_ranks:
        yield Text(plain(each.text), style="yellow")
    yield Text(f"logs: {plain(facts.log_dir) or 'none'}", style="dim", overflow="fold")
    if note is not None:
        yield Text(note, style="bold red")


def _cycle_and_ranks(facts: JobFacts, now_ns: int) -> str:
    left = f"{facts.restarts_left} of {counted(facts.max_restarts, 'restart')} left"
    if facts.cycle is None:
        return f"no rank was started yet, {left}"
    phase = _PHASES[facts.phase]
    if facts.phase is JobPhase.RUNNING and facts.cycle_started_ns is not None:
        phase += f" for {duration((now_ns - facts.cycle_started_ns) / 1e9)}"
    here, nodes = len(facts.ranks), counted(facts.nodes, "node")
    ranks = counted(here, "rank") if here == facts.world_size else f"{here} of {facts.world_size} ranks here on {nodes}"
    return f"cycle {facts.cycle} {phase}, {ranks}, {left}"


def _rank_table(rows: list[RankRow], *, width: int) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name, least in COLUMNS.items():
        table.add_column(
            name,
            justify="right" if name in ("rank", "for", "iteration") else "left",
            no_wrap=name
            != "section",  # it becomes narrower than its texts, which are cut; the rest is short and important
            min_width=least if width >= _ROOM_FOR_ALL else None,
        )
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: RankRow) -> tuple[Text, ...]:
    """Return the cells in the order of ``COLUMNS``, as ``Text``, because rich would read a plain str as markup."""
    from rich.text import Text

    open_s = row.sections[-1].open_s if row.sections else row.out_of_section_s
    section = Text(" > ".join(plain(each.name) for each in row.sections), no_wrap=True, overflow="ellipsis")
    if not row.sections:
        section = Text("-" if open_s is None else "out of section", style="dim")
    return (
        Text(str(row.rank)),
        section,
        Text("-" if open_s is None else duration(open_s)),
        Text("-" if row.iteration is None else str(row.iteration)),
        _used(row),
        _state(row),
    )


def _used(row: RankRow) -> Text:
    """Return the timeout with the highest share, with its name if that isn't the rank's current section."""
    from rich.text import Text

    use = row.timeout
    if use is None:
        return Text("-")
    limit = f"{use.timeout_s:.3g} s" if use.timeout_s < 60 else duration(use.timeout_s)
    if use.section is None:
        name = "" if use.kind == HangKind.OUT_OF_SECTION.value else _HEARTBEATS[use.kind]
    else:
        name = "" if row.sections and row.sections[-1].name == use.section else plain(use.section)
        name = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."
    style = "red" if use.share >= _MANY else "yellow" if use.share >= _SOME else "green"
    return Text(f"{_percent(use.share):>5} of {limit}{f', {name}' if name else ''}", style=style)


def _state(row: RankRow) -> Text:
    from rich.text import Text

    if row.state is not RankState.EXITED:
        return Text(*_WORDS[row.state])
    if not row.exit_code:
        return Text("exited" if row.exit_code is None else "finished", style="dim")
    if row.exit_code > 0:
        return Text(f"exited with code {row.exit_code}", style="red")
    return Text(f"killed by {signal_name(-row.exit_code)}", style="red")


def _percent(share: float) -> str:
    return f"{int(share * 100)} %"
