"""State of a whole job by the records of its launchers on all nodes, and its age. Pure.

What a cycle was tells the accounting of the run; here are the nodes, now, and what the job waits for.

Times are nanoseconds since the epoch unless a name says otherwise. A launcher records what changes, and every
minute what its ranks do, if these call hooks: of a job without hooks that trains nothing is heard for hours.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from megatron_ft.cli.logs.read import EventLogFile
from megatron_ft.cli.logs.runs import Run
from megatron_ft.core.codec import Fact, Finite, Int
from megatron_ft.core.facts import launcher as records
from megatron_ft.core.facts.all_kinds import Record
from megatron_ft.core.facts.reported_hang import ReportedHang
from megatron_ft.core.hosts import natural
from megatron_ft.core.wording import counted, listed
from megatron_ft.job.rules.lives import Ending, Life

_RESTARTS = "restart"


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


class NodeRow(Fact, frozen=True, kw_only=True):
    """One node. ``cycle``, ``place``: of the last cycle it took part in; ``detail`` as in "code 0"."""

    name: str
    state: State
    detail: str = ""
    cycle: Int | None = None
    place: Int | None = None
    age_s: Finite = 0.0


class JobView(Fact, frozen=True, kw_only=True):
    """The newest run of a job. ``age_s`` is the time since its newest record; None is unknown.

    Args:
        log_dir: where its logs are.
        is_over: by ``result.json``, or because all launchers have recorded their end.
        outcome, cause: by ``result.json``, once the job has ended.
        exit_code: by ``result.json``, or that of all launchers, if equal.
        cycle: last cycle that has begun, ``cycle_s`` seconds ago; ``runs``: it hasn't ended on every node.
        waits_for: in words; empty for nothing.
        goodput: share of productive steps; None if no iteration has begun.
        hangs: reported ones.
        last_cycle, last_cause: last cycle that has not ended well, and why.
    """

    run_id: str
    age_s: Finite
    nodes: tuple[NodeRow, ...]
    log_dir: str = ""
    is_over: bool = False
    outcome: Ending | None = None
    exit_code: Int | None = None
    cause: str = ""
    cycle: Int | None = None
    cycle_s: Finite = 0.0
    runs: bool = False
    ranks: Int | None = None
    max_restarts: Int | None = None
    restarts_left: Int | None = None
    iteration: Int | None = None
    goodput: Finite | None = None
    hangs: tuple[ReportedHang, ...] = ()
    waits_for: str = ""
    last_cycle: Int | None = None
    last_cause: str = ""


def view(run: Run, life: Life | None, now_ns: int) -> JobView:
    """Return how the job of a run stands; ``life``: the job's, as ``result.json`` has it, None if that isn't known."""
    launchers = [log for log in run.files if log.header.role == "launcher"]
    newest_ns: dict[str, int] = {}
    for log, offset_ns in zip(run.files, run.offsets_ns, strict=True):
        newest_ns[log.host] = max(newest_ns.get(log.host, 0), log.newest + offset_ns)
    told = [(log, _told_by(log)) for log in launchers]
    cycle = max((each.started.cycle for _, each in told if each.started is not None), default=None)
    ages_s = {host: max(0, now_ns - at_ns) / 1e9 for host, at_ns in newest_ns.items()}
    rows = _rows(told, cycle, ages_s)
    newest = next((each for each in run.cycles if each.cycle == cycle), None)
    failed = [each for each in run.cycles if each.cause is not None]
    ended = None if life is None or life.outcome is Ending.RUNNING else life
    codes = [each.last.exit_code for _, each in told if isinstance(each.last, records.RunEnded)]
    is_over = ended is not None or len(codes) == len(launchers)
    rows = [replace(row, state=State.LOST) if is_over and row.state in _OPEN else row for row in rows]
    iterations = [*(each.last_iteration for each in run.cycles), None if life is None else life.iteration]
    code = codes[0] if is_over and len(set(codes)) == 1 else None
    return JobView(
        run_id=run.run_id,
        age_s=max(0, now_ns - max(newest_ns.values())) / 1e9,
        nodes=tuple(rows),
        is_over=is_over,
        outcome=None if ended is None else ended.outcome,
        exit_code=code if ended is None else ended.exit_code,
        cause="" if ended is None else ended.cause,
        cycle=cycle,
        cycle_s=0.0 if newest is None else max(0, now_ns - newest.begin_ns) / 1e9,
        runs=not is_over and any(row.state is State.TRAINING for row in rows),
        ranks=run.world_size,
        max_restarts=run.max_restarts,
        restarts_left=None if newest is None else newest.restarts_left,
        iteration=max((each for each in iterations if each is not None and each >= 0), default=None),
        goodput=None if run.accounting.goodput is None else run.accounting.goodput.share,
        hangs=run.accounting.hangs,
        waits_for="" if is_over else _waits_for(rows, cycle),
        last_cycle=failed[-1].cycle if failed else None,
        last_cause=failed[-1].cause.text if failed and failed[-1].cause else "",
    )


class _Told(NamedTuple):
    """The last records of a launcher that matter for the state of its node."""

    started: records.CycleStarted | None = None
    ended: records.CycleEnded | None = None
    last: Record | None = None


def _told_by(log: EventLogFile) -> _Told:
    told = _Told()
    for entry in log.entries:
        match entry.record:
            case records.CycleStarted() as record:
                told = _Told(started=record)
            case records.CycleEnded() as record if told.started is not None and record.cycle == told.started.cycle:
                told = told._replace(ended=record)
            case records.NodeHealth() | records.StopRequested() | records.Abandoned() | records.RunEnded() as record:
                told = told._replace(last=record)
    return told


def _rows(told: Sequence[tuple[EventLogFile, _Told]], newest: int | None, ages_s: Mapping[str, float]) -> list[NodeRow]:
    """Return one row per node, in the order of places."""
    last_ns = {log.host: log.header.wall_ns for log, _ in sorted(told, key=lambda each: each[0].header.wall_ns)}
    rows = []
    for log, each in told:
        cycle, place = (None, None) if each.started is None else (each.started.cycle, each.started.group_rank)
        if cycle == newest or log.header.wall_ns == last_ns[log.host]:  # else its host has had another launcher since
            state, detail = _state(each, newest)
            rows.append(
                NodeRow(name=log.host, state=state, detail=detail, cycle=cycle, place=place, age_s=ages_s[log.host])
            )
    # states are corrected by majority: a node that others have lost records the end of a cycle that goes on
    training = sum(row.state is State.TRAINING for row in rows)
    goes_on = 2 * training > sum(row.cycle == newest for row in rows)
    before, now = (State.READY, State.STANDBY) if goes_on else (State.TRAINING, State.ENDING)
    rows = [replace(row, state=now) if row.state is before else row for row in rows]
    return sorted(rows, key=lambda row: (row.place is None, row.place or 0, natural(row.name)))


def _state(told: _Told, newest: int | None) -> tuple[State, str]:
    started, ended, last = told.started, told.ended, told.last
    match last:
        case records.RunEnded(exit_code=code):
            return State.ENDED, f"code {code}"
        case records.StopRequested(signal=name):
            return State.LEAVING, name
        case records.Abandoned(text=text):
            return State.LEAVING, text
        case records.NodeHealth(good=False, text=text) if (
            started is None or ended is not None or started.cycle != newest
        ):
            return State.UNFIT, text
    if started is None:
        return (State.WAITING if newest is None else State.STANDBY), ""
    if started.cycle != newest:
        return (State.SILENT if ended is None else State.STANDBY), f"since cycle {started.cycle}"
    if ended is None:
        is_ill = isinstance(last, records.NodeHealth) and not last.good
        return State.TRAINING, State.UNFIT.value if is_ill else ""
    return (State.READY if ended.action == _RESTARTS else State.FINISHED), ended.outcome if not ended.action else ""


def _waits_for(rows: Sequence[NodeRow], cycle: int | None) -> str:
    """Return what the next cycle needs, or this one's end."""
    ready = [row for row in rows if row.state in (State.READY, State.WAITING)]
    if not ready:
        return ""
    if open_ := [row.name for row in rows if row.state is State.ENDING]:
        return f"the end of cycle {cycle} on {listed(open_)}"
    parts = [f"{counted(len(ready), 'node')} recorded as ready"]
    for state, words in ((State.UNFIT, "failing the health check"), (State.SILENT, "lost"), (State.LEAVING, "leaving")):
        if names := [row.name for row in rows if row.state is state]:
            parts.append(f"{words}: {listed(names)}")
    return f"nodes to meet for cycle {0 if cycle is None else cycle + 1} ({'; '.join(parts)})"
