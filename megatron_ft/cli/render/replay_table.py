"""What other timeouts would have done, for the terminal; needs rich (the extra `report`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from megatron_ft.cli.analysis.replay import Hung, Replayed
from megatron_ft.cli.render.cycles_table import took
from megatron_ft.cli.render.terminal import plain, terminal

__all__ = ["lines_of", "print_replay"]

_COLUMNS = ("section", "timeout at the end", "judged", "too early to judge", "would have been ended", "too long")
_SHOWN = 8


def print_replay(title: str, found: Sequence[Replayed], file: TextIO | None = None) -> None:
    """A table, and a line for each rank that would have been ended wrongly and for each hang."""
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
    """In words, what the table counts."""
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
