"""`megatron-ft status JOB_DIR`: state of a whole job, from the event logs in its shared directory.

What a cycle was tells the accounting of the run; here are the nodes, now, and what the job waits for. A launcher
records what changes, and every minute what its ranks do, if these call hooks: of a job without hooks that trains
nothing is heard for hours.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from megatron_ft.cli.base.terminal import duration, follow
from megatron_ft.cli.logs.read import EventLogFile
from megatron_ft.cli.logs.runs import Run, life_of, log_directory, runs_in
from megatron_ft.errors import ConfigError
from megatron_ft.job.rules.lives import Ending, Life
from megatron_ft.link.base.codec import Fact, Finite, Int, to_builtins
from megatron_ft.link.base.hosts import natural
from megatron_ft.link.base.wording import columns, counted, listed, printable
from megatron_ft.link.facts import launcher as records
from megatron_ft.link.facts.reported_hang import ReportedHang
from megatron_ft.records.rules.metrics import NodeActivity

_LONG_S = 120.0
_REDRAW_S = 2.0


class NodeRow(Fact, frozen=True, kw_only=True):
    """One node. ``cycle``, ``place``: of the last cycle it took part in; ``detail`` as in "exit code 0"."""

    name: str
    state: NodeActivity
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


def print_job(directory: str, *, as_json: bool, once: bool) -> bool:
    """Print the state of the newest run in the directory; in a terminal, redraw it until Ctrl-C or the job's end.

    Returns:
        False if there is no run.

    Raises:
        ConfigError: the directory can't be read.
    """
    job = read_job(directory)
    if job is None:
        return False

    def frame() -> tuple[str, bool]:
        newest = read_job(directory) or job
        return text_of(newest), not newest.is_over

    if as_json:
        print(json.dumps(to_builtins(job), indent=2), flush=True)
    elif once or job.is_over or not sys.stdout.isatty():
        print(text_of(job), flush=True)
    else:
        follow(frame, _REDRAW_S)
    return True


def read_job(directory: str) -> JobView | None:
    """Return the state of the newest run in the directory; None if there is none.

    Raises:
        ConfigError: the directory can't be read.
    """
    if not directory:
        raise ConfigError("JOB_DIR is empty: name the directory that ft_launcher names as 'logs:'")
    directory = log_directory(directory)
    runs = runs_in([directory])
    if not runs or not any(log.header.role == "launcher" for log in runs[-1].files):
        return None
    return view(runs[-1], life_of(directory, runs[-1]), time.time_ns(), log_dir=directory)


def view(run: Run, life: Life | None, now_ns: int, *, log_dir: str = "") -> JobView:
    """Return how the job of a run stands; ``life``: the job's, as ``result.json`` has it, None if that isn't known."""
    launchers = [log for log in run.files if log.header.role == "launcher"]
    ages_s: dict[str, float] = {}
    for log, offset_ns in zip(run.files, run.offsets_ns, strict=True):
        age_s = max(0, now_ns - log.newest - offset_ns) / 1e9
        ages_s[log.host] = min(ages_s.get(log.host, age_s), age_s)
    cycle = max((each.cycle for each in run.started), default=None)
    ended = None if life is None or life.outcome is Ending.RUNNING else life
    codes = [each.record.exit_code for each in run.records if isinstance(each.record, records.RunEnded)]
    is_over = ended is not None or len(codes) == len(launchers)
    rows = _rows(launchers, cycle, ages_s, is_over=is_over)
    newest = next((each for each in run.cycles if each.cycle == cycle), None)
    failed = next((each for each in reversed(run.cycles) if each.cause is not None), None)
    iterations = [*(each.last_iteration for each in run.cycles), None if life is None else life.iteration]
    own_code = codes[0] if is_over and len(set(codes)) == 1 else None
    goodput = run.accounting.goodput
    return JobView(
        run_id=run.run_id,
        age_s=min(ages_s.values()),
        nodes=tuple(rows),
        log_dir=log_dir,
        is_over=is_over,
        outcome=None if ended is None else ended.outcome,
        exit_code=own_code if ended is None else ended.exit_code,
        cause="" if ended is None else ended.cause,
        cycle=cycle,
        cycle_s=0.0 if newest is None else max(0, now_ns - newest.begin_ns) / 1e9,
        runs=any(row.state is NodeActivity.TRAINING for row in rows),
        ranks=run.world_size,
        max_restarts=run.max_restarts,
        restarts_left=None if newest is None else newest.restarts_left,
        iteration=max((each for each in iterations if each is not None and each >= 0), default=None),
        goodput=None if goodput is None else goodput.share,
        hangs=run.accounting.hangs,
        waits_for="" if is_over else _waits_for(rows, cycle),
        last_cycle=None if failed is None else failed.cycle,
        last_cause="" if failed is None or failed.cause is None else failed.cause.text,
    )


def _rows(
    launchers: Sequence[EventLogFile], newest: int | None, ages_s: Mapping[str, float], *, is_over: bool
) -> list[NodeRow]:
    """Return one row per node, in the order of places."""
    rows = []
    last_ns = {log.host: log.header.wall_ns for log in sorted(launchers, key=lambda log: log.header.wall_ns)}
    for log in launchers:
        row = _row(log, newest, ages_s[log.host])
        # else its host has had another launcher since
        rows += [row] if row.cycle == newest or log.header.wall_ns == last_ns[log.host] else []
    # a node that others have lost records the end of a cycle that goes on: the majority is right
    goes_on = 2 * sum(row.state is NodeActivity.TRAINING for row in rows) > sum(row.cycle == newest for row in rows)
    for at, row in enumerate(rows):
        if is_over and row.state in (NodeActivity.TRAINING, NodeActivity.LOST):
            rows[at] = replace(row, state=NodeActivity.LOST, detail="has recorded no end")
        elif goes_on and row.state is NodeActivity.WAITING:
            rows[at] = replace(row, state=NodeActivity.STANDBY, detail="")
        elif not goes_on and row.state is NodeActivity.TRAINING:
            rows[at] = replace(row, state=NodeActivity.ENDING, detail="its ranks, or lost")
    return sorted(rows, key=lambda row: (row.place is None, row.place or 0, natural(row.name)))


def _row(log: EventLogFile, newest: int | None, age_s: float) -> NodeRow:
    """Return the state of a node by the records of its launcher; ``newest``: the newest cycle of the job."""
    started: records.CycleStarted | None = None
    ended: records.CycleEnded | None = None
    last: object = None
    for entry in log.entries:
        match entry.record:
            case records.CycleStarted() as record:
                started, ended, last = record, None, None
            case records.CycleEnded() as record if started is not None and record.cycle == started.cycle:
                ended = record
            case records.NodeHealth() | records.StopRequested() | records.Abandoned() | records.RunEnded() as record:
                last = record
    is_ill = isinstance(last, records.NodeHealth) and not last.good
    match last:
        case records.RunEnded(exit_code=code):
            state, detail = NodeActivity.ENDED, f"exit code {code}"
        case records.StopRequested(signal=why) | records.Abandoned(text=why):
            state, detail = NodeActivity.LEAVING, why
        case records.NodeHealth(text=why) if is_ill and (
            started is None or ended is not None or started.cycle != newest
        ):
            state, detail = NodeActivity.UNFIT, why
        case _ if started is None:
            state, detail = NodeActivity.WAITING if newest is None else NodeActivity.STANDBY, ""
        case _ if started.cycle != newest:
            state = NodeActivity.LOST if ended is None else NodeActivity.STANDBY
            detail = f"since cycle {started.cycle}"
        case _ if ended is None:
            state, detail = NodeActivity.TRAINING, "its health check fails" if is_ill else ""
        case _ if ended.action == "restart":
            state, detail = NodeActivity.WAITING, "for the next cycle"
        case _:
            state, detail = NodeActivity.ENDED, ended.outcome
    cycle, place = (None, None) if started is None else (started.cycle, started.group_rank)
    return NodeRow(name=log.host, state=state, detail=detail, cycle=cycle, place=place, age_s=age_s)


def _waits_for(rows: Sequence[NodeRow], cycle: int | None) -> str:
    """Return what the next cycle needs, or this one's end."""
    named = {state: [row.name for row in rows if row.state is state] for state in NodeActivity}
    ready, ending = named[NodeActivity.WAITING], named[NodeActivity.ENDING]
    if not ready or ending:
        return f"the end of cycle {cycle} on {listed(ending)}" if ready else ""
    parts = [f"{counted(len(ready), 'node')} recorded as ready"]
    others = (NodeActivity.UNFIT, NodeActivity.LOST, NodeActivity.LEAVING)
    parts += [f"{state.value}: {listed(named[state])}" for state in others if named[state]]
    return f"nodes to meet for cycle {0 if cycle is None else cycle + 1} ({'; '.join(parts)})"


def text_of(job: JobView) -> str:
    """Return the job's state for a person, harmless for a terminal."""
    if job.is_over:
        code = "" if job.exit_code is None else f" with exit code {job.exit_code}"
        parts = [f"{'ended' if job.outcome is None else job.outcome.value}{code}"]
        parts += [] if job.cycle is None else [counted(job.cycle + 1, "cycle")]
    elif job.cycle is None:
        parts = ["no cycle has begun yet"]
    else:
        parts = [f"cycle {job.cycle} {f'running for {duration(job.cycle_s)}' if job.runs else 'has ended'}"]
    parts += [] if job.ranks is None else [counted(job.ranks, "rank")]
    if job.restarts_left is not None and job.max_restarts is not None:
        parts.append(f"{job.restarts_left} of {counted(job.max_restarts, 'restart')} left")
    parts += [] if job.iteration is None else [f"iteration {job.iteration}"]
    parts += [] if job.goodput is None else [f"goodput {job.goodput:.1%}"]
    lines = [f"job{'' if job.run_id == 'none' else f' {job.run_id}'}: {', '.join(parts)}"]
    lines += [f"waiting for {job.waits_for}"] if job.waits_for else []
    if job.cause:
        lines.append(f"it ended: {job.cause}")
    elif job.last_cycle is not None:
        lines.append(f"cycle {job.last_cycle} ended: {job.last_cause}")
    cells = [("node", "place", "state", "last record")]
    for row in job.nodes:
        state = f"{row.state.value} ({row.detail})" if row.detail else row.state.value
        cells.append((row.name, "-" if row.place is None else str(row.place), state, f"{duration(row.age_s)} ago"))
    is_silent = not job.is_over and job.age_s >= _LONG_S
    doubt = " (ranks that call hooks are recorded every minute: it may have been killed, or not reach this directory)"
    newest = f"newest record: {duration(job.age_s)} ago{doubt if is_silent else ''}"
    return "\n".join(map(printable, [*lines, *(hang.line for hang in job.hangs), "", *columns(cells), "", newest]))
