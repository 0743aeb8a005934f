"""What `--ft-on-event` tells: one JSON object for the end of a cycle or of the job, and for a lost node. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_ft.job.rules.lives import Ending
from megatron_ft.link.base.codec import to_builtins
from megatron_ft.link.facts.all_kinds import Record
from megatron_ft.link.facts.launcher import CycleEnded, NodeLost

CYCLE_ENDED, JOB_ENDED, NODE_LOST = EVENTS = ("cycle_ended", "job_ended", "node_lost")

_MOMENTS = ("noticed_ns", "ending_ns")
"""Fields that only readers of event logs can use."""


def notification(record: Record) -> dict[str, Any] | None:
    """Return the object for a record; None if no person needs to know."""
    match record:
        case CycleEnded():
            why = record.cause.line if record.cause is not None else record.outcome
            follows = f" ({record.action})" if record.action else ""
            known = {name: value for name, value in to_builtins(record).items() if name not in _MOMENTS}
            return _told(CYCLE_ENDED, f"cycle {record.cycle} ended: {why}{follows}", known)
        case NodeLost():
            why = f": {record.text}" if record.text else ""
            return _told(NODE_LOST, f"node {record.node} is lost{why}", to_builtins(record))
    return None


def job_ended(ending: Ending, exit_code: int, cause: str) -> dict[str, Any]:
    """Return the object for the end of the job."""
    outcome = ending.value.replace("_", " ")
    text = f"the job has ended: {outcome}" + (f": {cause}" if cause else "")
    return _told(JOB_ENDED, text, {"outcome": ending.value, "exit_code": exit_code, "cause": cause})


def _told(event: str, text: str, known: Mapping[str, Any]) -> dict[str, Any]:
    return {"event": event, "text": text, **{name: value for name, value in known.items() if name != "text"}}
