"""The ranks of a running job as a table for the terminal.

Texts from outside (names of sections, errors) go through ``printable``: they may hold terminal control sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatron_ft.cli.base.terminal import duration
from megatron_ft.link.base.intervals import HangKind
from megatron_ft.link.base.signal_rules import signal_name
from megatron_ft.link.base.wording import counted, printable
from megatron_ft.link.messages.job_facts import JobFacts, JobPhase, RankRow, RankState

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_COLUMNS = {"rank": 4, "section": 24, "for": 11, "iteration": 9, "timeout used": 20, "state": 17}
"""Columns with their usual widths, so that nothing jumps from one drawing to the next."""
_ROOM_FOR_ALL = 120
_LONGEST_NAME = 20
_MANY, _SOME = 0.8, 0.5
_WORDS = {
    RankState.HUNG: ("hung, being terminated", "bold red"),
    RankState.DAMAGED: ("board damaged", "magenta"),
    RankState.STOPPED: ("process stopped", "bold yellow"),
    RankState.NOT_ATTACHED: ("not attached yet", "cyan"),
    RankState.CLOSING: ("monitoring ended", "dim"),
    RankState.PAUSED: ("paused", "yellow"),
    RankState.RUNNING: ("running", "green"),
}
_HEARTBEATS = {HangKind.INITIAL_HEARTBEAT.value: "first heartbeat", HangKind.HEARTBEAT.value: "heartbeat"}
_PHASES = {
    JobPhase.STARTING: "starting",
    JobPhase.RUNNING: "running",
    JobPhase.RESTARTING: "ended, the next one is starting",
    JobPhase.ENDING: "ended, the job is ending",
}
_Styled = tuple[str, str]
"""Text and its style."""


def job_frame(facts: JobFacts, note: str | None, *, width: int) -> Group:
    """Draw one job in this width. ``note`` warns that the values may be out of date."""
    from rich.console import Group
    from rich.text import Text

    head = [Text(text, style=style, overflow="fold") for text, style in _head(facts, note)]
    return Group(*head, *([_rank_table(facts.ranks, width=width)] if facts.ranks else []))


def _head(facts: JobFacts, note: str | None) -> Iterator[_Styled]:
    now_ns = facts.now_ns
    up = duration((now_ns - facts.started_ns) / 1e9)
    yield f"job {printable(facts.run_id)}  ft_launcher {facts.launcher_pid}, up {up}", "bold"
    left = f"{facts.restarts_left} of {counted(facts.max_restarts, 'restart')} left"
    if facts.cycle is None:
        yield f"no rank was started yet, {left}", ""
    else:
        phase, here = _PHASES[facts.phase], len(facts.ranks)
        if facts.phase is JobPhase.RUNNING and facts.cycle_started_ns is not None:
            phase += f" for {duration((now_ns - facts.cycle_started_ns) / 1e9)}"
        ranks = counted(here, "rank")
        if here != facts.world_size:
            ranks = f"{here} of {facts.world_size} ranks here on {counted(facts.nodes, 'node')}"
        yield f"cycle {facts.cycle} {phase}, {ranks}, {left}", ""
    if facts.paused_since_ns is not None:
        since = duration((now_ns - facts.paused_since_ns) / 1e9)
        yield f"paused for {since}: hang detection is off until `megatron-ft resume`", "yellow"
    if facts.observe_only:
        yield "observe-only: hung ranks are reported, not killed", "yellow"
    if facts.last_cause is not None:
        yield f"cycle {facts.last_cause.cycle} ended: {printable(facts.last_cause.text)}", ""
    if facts.goodput is not None:
        yield f"goodput {facts.goodput:.1%}", ""
    for hang in facts.hangs:
        yield printable(hang.line), "dim" if hang.went_on else "bold red"
    for each in facts.slow_ranks:
        yield printable(each.text), "yellow"
    yield f"logs: {printable(facts.log_dir) or 'none'}", "dim"
    if note is not None:
        yield note, "bold red"


def _rank_table(rows: Sequence[RankRow], *, width: int) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name, least in _COLUMNS.items():
        table.add_column(
            name,
            justify="right" if name in ("rank", "for", "iteration") else "left",
            # the section's column becomes narrower than its texts, which are cut; the rest is short and important
            no_wrap=name != "section",
            min_width=least if width >= _ROOM_FOR_ALL else None,
        )
    for row in rows:
        open_s = row.sections[-1].open_s if row.sections else row.out_of_section_s
        section = " > ".join(printable(each.name) for each in row.sections), ""
        if not row.sections:
            section = "-" if open_s is None else "out of section", "dim"
        cells = (
            (str(row.rank), ""),
            section,
            ("-" if open_s is None else duration(open_s), ""),
            ("-" if row.iteration is None else str(row.iteration), ""),
            _used(row),
            _state(row),
        )
        # Text: rich would read a plain str as markup
        table.add_row(*(Text(text, style=style, no_wrap=True, overflow="ellipsis") for text, style in cells))
    return table


def _used(row: RankRow) -> _Styled:
    """Return the timeout with the highest share, with its name if that isn't the rank's current section."""
    use = row.timeout
    if use is None:
        return "-", ""
    limit = f"{use.timeout_s:.3g} s" if use.timeout_s < 60 else duration(use.timeout_s)
    name = _HEARTBEATS.get(use.kind, printable(use.section or ""))
    name = "" if row.sections and row.sections[-1].name == use.section else name
    name = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."
    style = "red" if use.share >= _MANY else "yellow" if use.share >= _SOME else "green"
    return f"{int(use.share * 100):>3} % of {limit}{f', {name}' if name else ''}", style


def _state(row: RankRow) -> _Styled:
    if row.state is not RankState.EXITED:
        return _WORDS[row.state]
    if not row.exit_code:
        return "exited" if row.exit_code is None else "finished", "dim"
    how = f"exited with code {row.exit_code}" if row.exit_code > 0 else f"killed by {signal_name(-row.exit_code)}"
    return how, "red"
