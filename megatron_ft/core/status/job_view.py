"""State of a whole job by the records of its launchers on all nodes, and its age. Pure.

Times are nanoseconds since the epoch unless a name says otherwise. A launcher records changes, and monitors record
ranks' events at least every 30 s, if these call hooks: a training job without hooks may be silent for hours.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_ft.core.hosts import natural
from megatron_ft.core.job.lives import Ending, Life
from megatron_ft.core.records import launcher as records
from megatron_ft.core.records.all_kinds import Record
from megatron_ft.core.wording import counted, listed

_RESTARTS = "restart"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Records of one launcher with their times, oldest first; ``newest_ns`` and ``iteration`` include its ranks'."""

    host: str
    opened_ns: int
    records: Sequence[tuple[int, Record | None]]
    newest_ns: int
    iteration: int | None = None


class State(enum.Enum):
    """State of a node, as far as recorded."""

    WAITING = "waiting for the first cycle"
    TRAINING = "training"
    ENDING = "ending its ranks, or lost"
    """Half of the nodes or more have recorded the end of the cycle, and this one hasn't."""
    READY = "waiting for the next cycle"
    FINISHED = "finished"
    STANDBY = "on standby"
    UNFIT = "failing its health check"
    LEAVING = "leaving the job"
    SILENT = "lost, or cut off from the log directory"
    """Others have begun a cycle since, and this node hasn't recorded the end of its own."""
    ENDED = "its launcher has exited"
    LOST = "lost: it has recorded no end"
    """The job is over, without a recorded end of this node."""


_OPEN = (State.TRAINING, State.ENDING, State.SILENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """One node. ``cycle``, ``place``: of the last cycle it took part in; ``detail`` as in "code 0"."""

    name: str
    state: State
    detail: str = ""
    cycle: int | None = None
    place: int | None = None
    age_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """The job. ``age_s`` is the time since its newest record; None is unknown.

    Args:
        is_over: by ``result.json``, or else by the launchers' records.
        outcome, cause: by ``result.json``, once the job has ended.
        exit_code: by ``result.json``, or that of all launchers that have recorded one, if equal.
        cycle: last cycle that has begun, ``cycle_s`` seconds ago; ``runs``: it hasn't ended on every node.
        waits_for: in words; empty for nothing.
        last_cycle, last_cause: last cycle that has not ended well, and why.
    """

    age_s: float
    nodes: tuple[NodeRow, ...]
    is_over: bool = False
    outcome: Ending | None = None
    exit_code: int | None = None
    cause: str = ""
    cycle: int | None = None
    cycle_s: float = 0.0
    runs: bool = False
    ranks: int | None = None
    max_restarts: int | None = None
    restarts_left: int | None = None
    iteration: int | None = None
    waits_for: str = ""
    last_cycle: int | None = None
    last_cause: str = ""


def view(launchers: Sequence[Launcher], life: Life | None, now_ns: int) -> JobView:
    """Build the view. ``life``: the job's in ``result.json``, None if unknown. There is at least one launcher."""
    begun = [(at_ns, each) for node in launchers for at_ns, each in node.records if type(each) is records.CycleStarted]
    cycle = max((each.cycle for _, each in begun), default=None)
    newest = [(at_ns, each) for at_ns, each in begun if each.cycle == cycle]
    rows = _ending(_without_replaced([(node, _row(node, cycle, now_ns)) for node in launchers], cycle), cycle)
    ends = [(at_ns, each) for node in launchers for at_ns, each in node.records if type(each) is records.CycleEnded]
    last = _last_cause(ends)
    has_ended = life is not None and life.outcome is not Ending.RUNNING
    codes = _exit_codes(launchers, max((at_ns for at_ns, _ in newest), default=0))
    is_over = has_ended or (bool(codes) and not any(row.state in (State.TRAINING, State.READY) for row in rows))
    rows = tuple(replace(row, state=State.LOST) if is_over and row.state in _OPEN else row for row in rows)
    runs = not is_over and any(row.state is State.TRAINING for row in rows)
    first = newest[0][1] if newest else None
    # restarts left for the next cycle, once the last one has ended
    left = [each.restarts_left for _, each in ends if each.cycle == cycle and each.restarts_left is not None]
    return JobView(
        age_s=max(0, now_ns - max(node.newest_ns for node in launchers)) / 1e9,
        nodes=rows,
        is_over=is_over,
        outcome=life.outcome if life is not None and has_ended else None,
        exit_code=life.exit_code if life is not None and has_ended else _same(codes) if is_over else None,
        cause=life.cause if life is not None and has_ended else "",
        cycle=cycle,
        cycle_s=max(0, now_ns - min(at_ns for at_ns, _ in newest)) / 1e9 if newest else 0.0,
        runs=runs,
        ranks=None if first is None else first.world_size,
        max_restarts=None if first is None else first.max_restarts,
        restarts_left=min(left) if left else None if first is None else first.restarts_left,
        iteration=_iteration(launchers, ends, life),
        waits_for="" if is_over else _waits_for(rows, cycle),
        last_cycle=None if last is None else last.cycle,
        last_cause="" if last is None or last.cause is None else last.cause.text or "",
    )


def _exit_codes(launchers: Sequence[Launcher], since_ns: int) -> list[int | None]:
    """Return exit codes of the launchers that stayed until the job's end; of all, if none did."""
    all_, stayed = [], []
    for node in launchers:
        was_asked = any(type(each) in (records.StopRequested, records.Abandoned) for _, each in node.records)
        for at_ns, each in node.records:
            if type(each) is records.RunEnded:
                all_.append(each.exit_code)
                stayed += [each.exit_code] if at_ns >= since_ns and not was_asked else []
    return all_ if len(all_) == len(launchers) else stayed


def _same(codes: Sequence[int | None]) -> int | None:
    return codes[0] if len(set(codes)) == 1 else None


def _row(node: Launcher, newest: int | None, now_ns: int) -> NodeRow:
    started: records.CycleStarted | None = None
    ended: records.CycleEnded | None = None
    last: Record | None = None
    for _, record in node.records:
        match record:
            case records.CycleStarted():
                started, ended, last = record, None, None
            case records.CycleEnded() if started is not None and record.cycle == started.cycle:
                ended = record
            case records.NodeHealth() | records.StopRequested() | records.Abandoned() | records.RunEnded():
                last = record
    state, detail = _state(started, ended, last, newest)
    return NodeRow(
        name=node.host,
        state=state,
        detail=detail,
        cycle=None if started is None else started.cycle,
        place=None if started is None else started.group_rank,
        age_s=max(0, now_ns - node.newest_ns) / 1e9,
    )


def _state(
    started: records.CycleStarted | None, ended: records.CycleEnded | None, last: Record | None, newest: int | None
) -> tuple[State, str]:
    match last:
        case records.RunEnded(exit_code=code):
            return State.ENDED, f"code {code}"
        case records.StopRequested(signal=name):
            return State.LEAVING, name
        case records.Abandoned(text=text):
            return State.LEAVING, text
        case records.NodeHealth(good=False, text=text):
            return State.UNFIT, text
    if started is None:
        return (State.WAITING if newest is None else State.STANDBY), ""
    if started.cycle != newest:
        return (State.SILENT if ended is None else State.STANDBY), f"since cycle {started.cycle}"
    if ended is None:
        return State.TRAINING, ""
    return (State.READY if ended.action == _RESTARTS else State.FINISHED), ended.outcome if not ended.action else ""


def _without_replaced(rows: Sequence[tuple[Launcher, NodeRow]], newest: int | None) -> tuple[NodeRow, ...]:
    """Drop launchers of earlier cycles whose host has had a later one; sort by place."""
    last_ns = {node.host: node.opened_ns for node, _ in sorted(rows, key=lambda each: each[0].opened_ns)}
    kept = [row for node, row in rows if row.cycle == newest or node.opened_ns == last_ns[node.host]]
    return tuple(sorted(kept, key=lambda row: (row.place is None, row.place or 0, natural(row.name))))


def _ending(rows: Sequence[NodeRow], newest: int | None) -> tuple[NodeRow, ...]:
    """Correct states by majority: a node that others have lost records the end of a cycle that goes on."""
    training = sum(row.state is State.TRAINING for row in rows)
    goes_on = 2 * training > sum(row.cycle == newest for row in rows)
    before, now = (State.READY, State.STANDBY) if goes_on else (State.TRAINING, State.ENDING)
    return tuple(replace(row, state=now) if row.state is before else row for row in rows)


def _last_cause(ends: Sequence[tuple[int, records.CycleEnded]]) -> records.CycleEnded | None:
    """Return the end of the last cycle that failed, preferring a record that names more than a lost node."""
    failed = [(at_ns, end, end.cause) for at_ns, end in ends if end.cause is not None]
    best = max(failed, key=lambda each: (each[1].cycle, each[2].kind != "membership", -each[0]), default=None)
    return None if best is None else best[1]


def _iteration(
    launchers: Sequence[Launcher], ends: Sequence[tuple[int, records.CycleEnded]], life: Life | None
) -> int | None:
    iterations = [node.iteration for node in launchers]
    if all(each is None for each in iterations):
        iterations = [end.iteration for _, end in ends] + [life.iteration if life is not None else None]
    return max((each for each in iterations if each is not None and each >= 0), default=None)


def _waits_for(rows: Sequence[NodeRow], cycle: int | None) -> str:
    """Return what the next cycle needs, or this one's end."""
    ready = [row for row in rows if row.state in (State.READY, State.WAITING)]
    if not ready:
        return ""
    open_ = [row.name for row in rows if row.state is State.ENDING]
    if open_:
        return f"the end of cycle {cycle} on {listed(open_)}"
    parts = [f"{counted(len(ready), 'node')} recorded as ready"]
    for state, words in ((State.UNFIT, "failing the health check"), (State.SILENT, "lost"), (State.LEAVING, "leaving")):
        if names := [row.name for row in rows if row.state is state]:
            parts.append(f"{words}: {listed(names)}")
    return f"nodes to meet for cycle {0 if cycle is None else cycle + 1} ({'; '.join(parts)})"
