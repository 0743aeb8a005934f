"""Figures of several runs and several peers, and the table that they end in."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["PEERS", "Row", "compare", "median", "middle", "percentile", "print_table"]

PEERS = {"torchrun": "torchrun", "reference": "nvidia-resiliency-ext 0.4.1"}


@dataclass(frozen=True)
class Row:
    """One line of the table; None where there is no figure."""

    what: str
    unit: str
    ours: float | None
    theirs: Mapping[str, float | None] = field(default_factory=dict)
    is_compared: bool = True
    more_is_better: bool = False

    def ratio(self, peer: str) -> float | None:
        """How many times better ours is."""
        theirs = self.theirs.get(peer)
        if not self.is_compared or not self.ours or not theirs:
            return None
        return self.ours / theirs if self.more_is_better else theirs / self.ours

    def cells(self) -> list[str]:
        """What the table shows: of each peer the figure and the ratio."""
        shown = [self.what, _with_unit(self.ours, self.unit)]
        for peer in PEERS:
            ratio = self.ratio(peer)
            shown += [_with_unit(self.theirs.get(peer), self.unit), "-" if ratio is None else f"{ratio:.2f}x"]
        return shown


def _with_unit(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.3g} {unit}"


def compare(what: str, unit: str, figures: Mapping[str, float | None], **more: Any) -> Row:
    """A row from the figures by launcher."""
    return Row(what, unit, figures.get("ours"), {name: figures.get(name) for name in PEERS}, **more)


def percentile(values: list[float], share: float) -> float:
    """The value that this share of all are at most."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def median(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None if none is."""
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def middle(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of every figure over the runs; runs that have no figures are no dictionaries, but None."""
    there = [run for run in found if run is not None]
    if not there:
        return {}
    return {
        key: middle([run[key] for run in there]) if isinstance(value, dict) else median(run[key] for run in there)
        for key, value in there[0].items()
    }


def print_table(title: str, rows: Iterable[Row]) -> None:
    """On standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    table.add_column("")
    table.add_column("megatron_ft", justify="right")
    for name in PEERS.values():
        table.add_column(name, justify="right")
        table.add_column("ratio", justify="right")
    for row in rows:
        table.add_row(*row.cells())
    Console(width=140).print(table)
