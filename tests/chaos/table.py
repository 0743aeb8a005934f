"""What a campaign has shown, as a table for the docs: fault, what happens, at which phases, how often, how long."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tests.chaos.check import Seen
from tests.chaos.plan import ALL_FAULTS, Outcome, outcome_of

__all__ = ["back_after_s", "table"]


def back_after_s(seen: Seen) -> list[float | None]:
    """For each event that ends something, seconds from the fault to the first step of a later cycle or launch.

    None where there is no such step.
    """
    at = {record["number"]: record["t"] for record in seen.trace if record["what"] == "fault"}
    found: list[float | None] = []
    for number, event in enumerate(seen.plan.events):
        begun = [
            record["t"]
            for record in seen.trace
            if record["what"] == "began" and (record["launch"], record["cycle"]) > (event.launch, event.cycle)
        ]
        waits = event.outcome != Outcome.NOTHING and number in at
        later = [t for t in begun if waits and t > at[number]]
        found.append(round((min(later) - at[number]) / 1e9, 2) if later else None)
    return found


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """In Markdown. Every fault that a run planned, and that happened and hit something, is in it.

    A fault in the results is its name, its phase, the seconds of ``back_after_s`` and whether it hit something; older
    results don't have the last of these: theirs are taken to have.
    """
    head = "| fault | what happens | phases | times | training again after, median (most) |\n|---|---|---|---|---|\n"
    met: dict[tuple[str, str], list[tuple[str, float | None]]] = {}
    for result in results:
        for fault, phase, back, *hit in result["faults"]:
            if all(hit):
                met.setdefault((fault, outcome_of(fault, phase)), []).append((phase, back))
    order = list(ALL_FAULTS)
    lines = []
    for (fault, outcome), events in sorted(met.items(), key=lambda item: (order.index(item[0][0]), item[0][1])):
        phases = ", ".join(sorted({phase for phase, _ in events}))
        times = sorted(back for _, back in events if back is not None)
        most = f"{statistics.median(times):.2f} s ({times[-1]:.1f} s)" if times else ""
        lines.append(f"| `{fault}` | {outcome} | {phases} | {len(events)} | {most} |")
    return head + "\n".join(lines) + "\n"
