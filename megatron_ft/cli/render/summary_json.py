"""The summary of a run as JSON: what the tables show, unrounded. Pure.

Times are seconds (``_s``) or wall ns since the epoch (``_ns``); what isn't known is null.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_ft.cli.analysis.analysis import Analysis

__all__ = ["summary_document"]


def summary_document(analysis: Analysis) -> dict[str, Any]:
    """One run. Fields may be added; those that there are keep their meaning."""
    run = dataclasses.asdict(analysis.summary)
    for cycle in run["cycles"]:
        cycle["phases_s"] = cycle.pop("phases")
        cycle["findings"] = [
            mark.text for mark in analysis.timeline.marks if mark.kind == "finding" and mark.cycle == cycle["cycle"]
        ]
        cycle["evidence"] = [
            {"rank": each.rank, "file": each.file, "summary": each.summary}
            for each in analysis.timeline.evidence
            if each.cycle == cycle["cycle"]
        ]
    return {
        **{name: value for name, value in run.items() if name != "cycles"},
        "restarts": analysis.summary.restarts,
        "begin_ns": analysis.timeline.begin_ns,
        "end_ns": analysis.timeline.end_ns,
        "lost_events": analysis.timeline.lost,
        "goodput": _goodput(analysis),
        "cycles": run["cycles"],
        "timeouts": [{**dataclasses.asdict(each), "margin": each.margin} for each in analysis.intervals],
    }


def _goodput(analysis: Analysis) -> dict[str, Any] | None:
    found = analysis.goodput
    return None if found is None else {"share": found.share, "down_s": found.down_s, **dataclasses.asdict(found)}
