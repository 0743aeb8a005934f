"""Event logs of a job that never ran, with as many ranks and steps as wanted."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ft.learning.intervals import BoardIntervals
from megatron_ft.link.base.codec import name_of, to_builtins
from megatron_ft.link.base.layout import EVENT_END as END
from megatron_ft.link.base.layout import EVENT_HEARTBEAT as HEARTBEAT
from megatron_ft.link.base.layout import EVENT_ITERATION as ITERATION
from megatron_ft.link.base.layout import EVENT_START as START
from megatron_ft.link.base.layout import KIND_SHIFT, SECTION_SHIFT, SectionView
from megatron_ft.link.facts import SCHEMA
from megatron_ft.link.facts.minutes import MINUTE_NS
from tests.fuzz.healthy import BOARD

__all__ = [
    "END",
    "HEARTBEAT",
    "ITERATION",
    "START",
    "Fault",
    "GeneratedJob",
    "minute_records",
    "write_job",
]

S = 1_000_000_000
NAMES = ["setup", "step", "checkpointing", "write shards"]
SETUP, STEP, CHECKPOINT, SHARDS = range(4)
RANKS_PER_NODE, STEP_S = 8, 0.5
TIMEOUTS = {"setup": 60.0, "step": 5.0, "checkpointing": 20.0, "write shards": 18.0}

Event = tuple[int, int, int]
"""ns on the host's clock, kind, and the section or the iteration's number."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """In that cycle, the rank hangs in that iteration."""

    cycle: int
    rank: int
    iteration: int


@dataclass(frozen=True, kw_only=True)
class GeneratedJob:
    """Every ``checkpoint_every`` iterations there is a checkpoint, from which a cycle resumes.

    ``lost_in_minute``: number of the minute of which half of the events were lost.
    """

    ranks: int = 4
    steps: int = 60
    checkpoint_every: int = 20
    faults: tuple[Fault, ...] = ()
    sections: tuple[str, ...] = tuple(NAMES)
    lost_in_minute: int | None = None

    def host(self, rank: int) -> str:
        return f"node-{rank // RANKS_PER_NODE}"


def minute_records(
    rank: int,
    cycle: int,
    names: list[str],
    from_ns: int,
    events: list[Event],
    *,
    until_ns: int | None = None,
    lost_in: int | None = None,
) -> list[dict[str, Any]]:
    """The `minute` records that a monitor makes of these events; in number ``lost_in`` half of them were lost."""
    sections = tuple(SectionView(name, 0, 0, None) for name in names)
    board = BOARD._replace(cycle=cycle, rank=rank, start_ns=from_ns, last_transition_ns=from_ns, sections=sections)
    intervals, found, head, opened = BoardIntervals(board), list[dict[str, Any]](), 0, dict[int, int]()
    end_ns = max(until_ns or 0, events[-1][0] if events else from_ns)
    for minute in range(from_ns // MINUTE_NS, end_ns // MINUTE_NS + 1):
        to_ns = min((minute + 1) * MINUTE_NS, end_ns)
        mine = [event for event in events if minute * MINUTE_NS <= event[0] < (minute + 1) * MINUTE_NS]
        for at, kind, what in mine:
            if kind == START:
                opened[what] = at
            elif kind == END:
                opened.pop(what, None)
        head += len(mine)
        views = tuple(each._replace(opened_at_ns=opened.get(at, 0)) for at, each in enumerate(sections))
        now = board._replace(sections=views, ring_head=head)
        kept = mine[len(mine) // 2 :] if len(found) == lost_in else mine
        words = [
            word
            for at, kind, what in kept
            for word in (at, kind << KIND_SHIFT | (what if kind >= HEARTBEAT else what << SECTION_SHIFT))
        ]
        intervals.feed(head - len(kept), words, now, to_ns)
        record = intervals.take_minute(now, to_ns)
        found.append({"t": to_ns, "ev": name_of(type(record)), **to_builtins(record)})
    return found


def write_job(directory: Path, job: GeneratedJob) -> None:
    """Write the logs of the launchers of a whole run."""
    boot_ns = {job.host(rank): (1000 + 77 * rank) * S for rank in range(0, job.ranks, RANKS_PER_NODE)}
    plan = list(_cycles(job))
    for host, boot in boot_ns.items():
        of_ranks = [_monitor_records(job, rank, boot, plan) for rank in range(job.ranks) if job.host(rank) == host]
        records = itertools.chain(_launcher_records(job, host, boot, plan), *of_ranks)
        _write(directory, host, boot, sorted(records, key=lambda record: record["t"]))
    for fault in job.faults:
        path = directory / evidence_file(job, fault)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"rank {fault.rank} is stopped\n  data_loader.py:88 next_batch <b>&</b>\n" * 12)


def evidence_file(job: GeneratedJob, fault: Fault) -> str:
    """Relative to the directory."""
    stem = f"rank{fault.rank}-cycle{fault.cycle}-{job.host(fault.rank)}-{5000 + fault.rank}"
    return f"evidence/cycle{fault.cycle}/{stem}.txt"


@dataclass(frozen=True, kw_only=True)
class _Cycle:
    """Times are seconds since the start of the run."""

    number: int
    start: float
    first: int
    last: int
    stops: float
    ends: float
    fault: Fault | None


def _cycles(job: GeneratedJob) -> Iterator[_Cycle]:
    start, first = 0.5, 0
    for number in range(len(job.faults) + 1):
        fault = next((fault for fault in job.faults if fault.cycle == number), None)
        last = job.steps - 1 if fault is None else fault.iteration
        checkpoints = (last + 1 if fault is None else last) // job.checkpoint_every - first // job.checkpoint_every
        stops = start + 3.0 + (last - first + 0.5) * STEP_S + checkpoints * 3 * STEP_S
        if fault is None:
            stops += 0.5 * STEP_S
        noticed = stops + (0.05 if fault is None else TIMEOUTS["step"])
        yield _Cycle(number=number, start=start, first=first, last=last, stops=stops, ends=noticed + 0.3, fault=fault)
        if fault is None:
            return
        start, first = noticed + 0.8, last // job.checkpoint_every * job.checkpoint_every


def _cause(job: GeneratedJob, cycle: _Cycle) -> dict[str, Any] | None:
    if cycle.fault is None:
        return None
    rank, section = cycle.fault.rank, job.sections[STEP]
    text = f"rank {rank} hung in '{section}' for 5.0 s (timeout 5.0 s)"
    return {"rank": rank, "kind": "hang", "text": text, "section": section}


def _launcher_records(job: GeneratedJob, host: str, boot: int, plan: list[_Cycle]) -> Iterator[dict[str, Any]]:
    ranks = [rank for rank in range(job.ranks) if job.host(rank) == host]
    pids = [{"rank": rank, "local_rank": rank % RANKS_PER_NODE, "pid": 5000 + rank} for rank in ranks]
    for cycle in plan:
        began = {"cycle": cycle.number, "ranks": pids, "world_size": job.ranks}
        yield {"t": boot + int(cycle.start * S), "ev": "cycle_started", **began}
        if cycle.number:
            seconds = {"stop": 0.3, "ranks created": 0.5, "imports": 0.4, "set up": 2.6, "first step": STEP_S}
            again = {"cycle": cycle.number, "seconds": seconds, "redone": plan[cycle.number - 1].last - cycle.first}
            yield {"t": boot + int((cycle.start + 3.0 + STEP_S) * S), "ev": "training_again", **again}
        end = boot + int(cycle.ends * S)
        for rank in ranks:
            code = 0 if cycle.fault is None else -9
            exited = {"cycle": cycle.number, "rank": rank, "exitcode": code, "by_us": bool(code)}
            yield {"t": end - S // 10, "ev": "rank_exited", **exited}
        if cycle.fault is not None:
            waiting = [rank for rank in range(job.ranks) if rank != cycle.fault.rank][:16]
            text = f"rank {cycle.fault.rank} stopped first; {job.ranks - 1} others wait in all_reduce"
            finding = {"cycle": cycle.number, "rank": cycle.fault.rank, "candidates": [cycle.fault.rank]}
            yield {"t": end - S // 20, "ev": "finding", **finding, "text": text, "waiting": waiting}
        outcome = "succeeded" if cycle.fault is None else "failed"
        action = "finish" if cycle.fault is None else "restart"
        ended = {"cycle": cycle.number, "outcome": outcome, "cause": _cause(job, cycle), "iteration": cycle.last}
        yield {"t": end, "ev": "cycle_ended", **ended, "action": action}
    yield {"t": boot + int((plan[-1].ends + 0.1) * S), "ev": "run_ended", "exit_code": 0}


def _monitor_records(job: GeneratedJob, rank: int, boot: int, plan: list[_Cycle]) -> Iterator[dict[str, Any]]:
    for cycle in plan:
        who = {"rank": rank, "cycle": cycle.number}
        begin = boot + int((cycle.start + 0.4) * S)
        yield {"t": begin, "ev": "attached", **who, "pid": 5000 + rank}
        sections = {name: TIMEOUTS[known] for name, known in zip(job.sections, NAMES, strict=True)}
        yield {"t": begin, "ev": "timeouts", **who, "sections": sections, "out_of_section": 10.0, "heartbeat": None}
        events = [event for event in _events(job, rank, boot, cycle) if event[0] < boot + int(cycle.ends * S)]
        starts = [at for at, kind, _ in events if kind == ITERATION]
        if starts:
            yield {"t": starts[0] + S, "ev": "first_iteration", **who, "iteration": cycle.first, "at_ns": starts[0]}
        names = list(job.sections)
        until_ns = boot + int((cycle.stops if cycle.fault is not None else cycle.ends - 0.1) * S)
        yield from minute_records(
            rank, cycle.number, names, begin, events, until_ns=until_ns, lost_in=job.lost_in_minute
        )
        end = boot + int((cycle.ends - 0.1) * S)
        if cycle.fault is not None and cycle.fault.rank == rank:
            yield from _hung(job, cycle, rank, events[-1][0])
        yield {"t": end, "ev": "detached" if cycle.fault is None else "rank_gone", **who, "iteration": cycle.last}


def _hung(job: GeneratedJob, cycle: _Cycle, rank: int, since: int) -> Iterator[dict[str, Any]]:
    assert cycle.fault is not None
    who = {"rank": rank, "cycle": cycle.number}
    at = since + int(TIMEOUTS["step"] * S)
    times = {"since_ns": since, "at_ns": at, "elapsed_s": 5.0, "timeout_s": 5.0, "observed_only": False}
    yield {"t": at, "ev": "verdict", **who, "kind": "section", "section": job.sections[STEP], **times}
    file = evidence_file(job, cycle.fault)
    summary = f"rank {rank} is in next_batch (data_loader.py:88), a poll that never returns"
    yield {"t": at + S // 20, "ev": "evidence", **who, "file": file, "summary": summary}


def _events(job: GeneratedJob, rank: int, boot: int, cycle: _Cycle) -> Iterator[Event]:
    """What the rank's board saw; a rank that hangs or waits for one that does never ends its step."""
    chance = random.Random(f"0 {rank} {cycle.number}")
    base = boot + int((cycle.start + 0.5) * S)
    yield base, START, SETUP
    yield base + 2 * S + chance.randrange(S // 4), END, SETUP
    at = base + int(2.5 * S)
    for iteration in range(cycle.first, cycle.last + 1):
        yield at, ITERATION, iteration
        begin = at + int(chance.uniform(0.01, 0.03) * STEP_S * S)
        yield begin, START, STEP
        if cycle.fault is not None and iteration == cycle.fault.iteration:
            return
        at += int(STEP_S * S)
        yield at - int(chance.uniform(0.02, 0.3) * STEP_S * S), END, STEP
        if (iteration + 1) % job.checkpoint_every == 0:
            long = int(3 * STEP_S * S)
            yield at, START, CHECKPOINT
            yield at + long // 10, START, SHARDS
            yield at + int(long * chance.uniform(0.7, 0.9)), END, SHARDS
            yield at + int(long * 0.95), END, CHECKPOINT
            at += long


def _write(directory: Path, host: str, boot: int, records: Iterable[dict[str, Any]]) -> None:
    wall = 1_790_000_000 * S
    header = {"t": boot, "ev": "log_opened", "schema": SCHEMA, "role": "launcher", "host": host, "pid": 7}
    path = directory / f"launcher-{host}-{wall}.jsonl"
    with path.open("w") as file:
        for record in [{**header, "run_id": "generated", "wall_ns": wall}, *records]:
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
