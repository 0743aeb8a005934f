"""Tables of figures, as the pages of docs show them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence


def middle(figures: Iterable[float | None]) -> float | None:
    """Return the median of those that are known; None if none is."""
    known = [each for each in figures if each is not None]
    return statistics.median(known) if known else None


def shown(value: float | None, unit: str = "") -> str:
    """Return a figure with two digits at least; a dash where there is none."""
    return "-" if value is None else f"{value:.2g}{unit}" if value < 10 else f"{value:.0f}{unit}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
