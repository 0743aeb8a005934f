"""Spans of a node's cycles, from the records of its launcher; named as in nvidia-resiliency-ext's telemetry. Pure.

The spans of a cycle follow each other: `health_check`, `round_wait`, `rendezvous`, `worker_start`, `run`, `teardown`;
`cycle` holds them all, and `fault` is a moment. `docs/telemetry.md` lists them. Times are those of CLOCK_MONOTONIC.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_ft.job.rules.restart_policy import Outcome
from megatron_ft.link.facts.all_kinds import Record
from megatron_ft.link.facts.launcher import Cause, CycleEnded, CycleStarted, NodeHealth

CYCLE = "nvrx.ft.cycle"
ROUND_WAIT = "nvrx.ft.round_wait"
RENDEZVOUS = "nvrx.ft.rendezvous"
HEALTH_CHECK = "nvrx.ft.health_check"
WORKER_START = "nvrx.ft.worker_start"
RUN = "nvrx.ft.run"
FAULT = "nvrx.ft.fault"
TEARDOWN = "nvrx.ft.teardown"
IS_OVERHEAD: Mapping[str, bool | None] = {
    CYCLE: None,
    HEALTH_CHECK: True,
    ROUND_WAIT: True,
    RENDEZVOUS: True,
    WORKER_START: True,
    RUN: False,
    FAULT: True,
    TEARDOWN: True,
}
"""``is_goodput_span`` of each span: True marks time in which no rank trains. None: the span has no such attribute."""

Value = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One span. All spans of one ``cycle`` are children of its `CYCLE`, which begins at ``cycle_begin_ns``."""

    name: str
    cycle: int
    cycle_begin_ns: int
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    error: str = ""
    """Why the cycle failed; the span's status is ERROR then."""


class NodeSpans:
    """Turns the records of one launcher into spans."""

    def __init__(self, node: str, now_ns: int) -> None:
        self._node = node
        self._begin_ns = now_ns
        """When the next cycle's span begins: the launcher's start, or the end of the cycle before."""
        self._ready_ns = now_ns
        self._started: CycleStarted | None = None

    def hear(self, record: Record, at_ns: int) -> list[Span]:
        """Return the spans that a record of this time completes."""
        match record:
            case NodeHealth():
                return [self._checked(record, at_ns)]
            case CycleStarted():
                return [*self._cycle_started(record, at_ns)]
            case CycleEnded():
                spans = [*self._cycle_ended(record, at_ns)]
                self._begin_ns = self._ready_ns = at_ns
                return spans
        return []

    def _checked(self, health: NodeHealth, at_ns: int) -> Span:
        self._ready_ns = at_ns
        begin_ns = at_ns - round((health.seconds or 0.0) * 1e9)
        said: dict[str, Value] = {"megatron_ft.health.good": health.good}
        if health.text:
            said["megatron_ft.health.text"] = f"{health.text}: {health.last_line}"
        return self._span(HEALTH_CHECK, health.cycle, begin_ns, at_ns, said)

    def _cycle_started(self, started: CycleStarted, at_ns: int) -> Iterable[Span]:
        self._started = started
        spawned_ns = started.spawned_ns or at_ns
        met_ns = started.met_ns or spawned_ns
        begun_ns = started.begun_ns or met_ns
        place: dict[str, Value] = {} if started.group_rank is None else {"nvrx.rank": started.group_rank}
        yield self._span(ROUND_WAIT, started.cycle, self._ready_ns, begun_ns)
        yield self._span(RENDEZVOUS, started.cycle, begun_ns, met_ns, place)
        yield self._span(WORKER_START, started.cycle, met_ns, spawned_ns)

    def _cycle_ended(self, ended: CycleEnded, at_ns: int) -> Iterable[Span]:
        started, self._started = self._started, None
        if started is None:
            return  # its ranks were never started here
        over_ns = ended.noticed_ns or ended.ending_ns or at_ns
        yield self._span(RUN, ended.cycle, started.spawned_ns or over_ns, over_ns)
        if ended.cause is not None:
            yield self._span(FAULT, ended.cycle, over_ns, over_ns, _verdict(ended.cause), ended.cause.line)
        yield self._span(TEARDOWN, ended.cycle, over_ns, at_ns)
        told: dict[str, Value] = {
            "nvrx.cycle_outcome": _outcome(ended.outcome, failed_here=ended.noticed_ns is not None)
        }
        known = {
            "nvrx.rank": started.group_rank,
            "nvrx.max_restarts": started.max_restarts,
            "nvrx.remaining_restarts": started.restarts_left,
            "megatron_ft.iteration": ended.iteration,
        }
        told.update({name: value for name, value in known.items() if value is not None})
        error = ended.cause.line if ended.cause is not None and ended.outcome == Outcome.FAILED.value else ""
        yield self._span(CYCLE, ended.cycle, self._begin_ns, at_ns, told, error)

    def _span(
        self,
        name: str,
        cycle: int,
        begin_ns: int,
        end_ns: int,
        attributes: Mapping[str, Value] | None = None,
        error: str = "",
    ) -> Span:
        common: dict[str, Value] = {"nvrx.cycle": cycle, "nvrx.node": self._node}
        overhead = IS_OVERHEAD[name]
        if overhead is not None:
            common["is_goodput_span"] = overhead
        return Span(
            name=name,
            cycle=cycle,
            cycle_begin_ns=self._begin_ns,
            begin_ns=min(begin_ns, end_ns),
            end_ns=end_ns,
            attributes={**common, **(attributes or {})},
            error=error,
        )


def _verdict(cause: Cause) -> dict[str, Value]:
    known = {
        "kind": cause.kind.value,
        "text": cause.line,
        "rank": cause.rank,
        "host": cause.host,
        "section": cause.section,
        "iteration": cause.iteration,
    }
    return {f"megatron_ft.cause.{name}": value for name, value in known.items() if value not in (None, "")}


def _outcome(outcome: str, *, failed_here: bool) -> str:
    """Return the outcome in the words of nvidia-resiliency-ext."""
    match outcome:
        case Outcome.SUCCEEDED.value | Outcome.EXCLUDED.value:
            return outcome
        case Outcome.FAILED.value if failed_here:
            return "failed"
        case Outcome.FAILED.value | Outcome.MEMBERSHIP.value:
            return "peer_restart"
    return "terminated"
