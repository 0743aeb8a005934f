"""Texts, tables and progress on a terminal."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO, TypeVar

from megatron_ft.core.errors import ConfigError
from megatron_ft.core.wording import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

T = TypeVar("T")
_LEAST_WIDTH = 160
_LONG_S = 2.0
"""Seconds of work after which a bar is shown."""


def check_extra(package: str, what: str, *, extra: str = "report") -> None:
    """Check that a package of an extra is installed.

    Raises:
        ConfigError: it is missing; the message names the extra that brings it.
    """
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{what} needs {package}: pip install 'megatron-ft[{extra}]'")


def terminal(file: TextIO | None = None) -> Console:
    """Return the console for tables; stdout if ``file`` is None."""
    from rich.console import Console

    file = sys.stdout if file is None else file
    console = Console(file=file, highlight=False)
    if not console.is_terminal and console.width < _LEAST_WIDTH:
        # rich assumes 80 columns of a pipe, where lines may have any length
        console = Console(file=file, highlight=False, width=_LEAST_WIDTH)
    return console


def track(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """Yield the items; on a terminal, a bar shows how many of ``total`` are done if they take more than 2 s."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=total)
    timer = threading.Timer(_LONG_S, bar.start)
    timer.start()
    try:
        for item in items:
            yield item
            bar.advance(task)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()


def plain(text: str, *, keep_lines: bool = False) -> str:
    """Return a text from outside, harmless for a terminal; in one line unless ``keep_lines``.

    Pass it to rich as ``Text``: in a plain str, square brackets would be markup.
    """
    return "\n".join(map(printable, text.split("\n"))) if keep_lines else printable(text)


def add_rows(table: Table, rows: Iterable[Sequence[str]], style: str = "") -> None:
    """Add rows of texts from any source."""
    from rich.text import Text

    for row in rows:
        table.add_row(*(Text(plain(cell, keep_lines=True), style=style) for cell in row))


def took(seconds: float | None) -> str:
    """Format seconds, as milliseconds below one second; a dash for None."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2f} s"
