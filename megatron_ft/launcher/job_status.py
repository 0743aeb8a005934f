"""What this launcher tells `megatron-ft status`: the facts of its job, and a row for each of its ranks."""

from __future__ import annotations

import os
import time

from megatron_ft.core.diagnosis.exits import Cause
from megatron_ft.core.job.restart_policy import Action, Decision
from megatron_ft.core.status.job_facts import JobFacts, LastCause, Phase
from megatron_ft.core.status.rows import RankFacts, RankReading, make_rows
from megatron_ft.ipc.linux.processes import read_stat
from megatron_ft.launcher.arguments import CommandLine
from megatron_ft.launcher.cycle.cycle_record import CycleRecord
from megatron_ft.launcher.monitors.monitors import Monitors

__all__ = ["JobStatus"]

_LONGEST_TEXT = 2000


class JobStatus:
    """Told of each cycle's start and end; everything else is looked up when somebody asks."""

    def __init__(self, line: CommandLine, *, log_dir: str | None, monitors: Monitors) -> None:
        self._line = line
        self._log_dir = log_dir
        self._monitors = monitors
        self._started_ns = time.monotonic_ns()
        self._phase = Phase.STARTING
        self._record: CycleRecord | None = None
        self._nodes = self._world_size = 0
        self._restarts_left = line.namespace.max_restarts
        self._last_cause: LastCause | None = None

    def cycle_started(self, record: CycleRecord, *, nodes: int, world_size: int, restarts_left: int) -> None:
        """The ranks of a cycle were made."""
        self._phase = Phase.RUNNING
        self._record = record
        self._nodes, self._world_size, self._restarts_left = nodes, world_size, restarts_left

    def cycle_ended(self, record: CycleRecord, decision: Decision, cause: Cause | None) -> None:
        """A cycle has ended; ``cause`` is None if it has ended well."""
        self._phase = Phase.RESTARTING if decision.action is Action.RESTART else Phase.ENDING
        self._restarts_left = decision.restarts_left
        if cause is not None:
            text = cause.text[:_LONGEST_TEXT]
            self._last_cause = LastCause(cycle=record.cycle, text=text, rank=cause.rank, kind=cause.kind.value)

    def last_iteration(self) -> int | None:
        """The furthest that a rank of this node has reported in the last cycle."""
        return None if self._record is None else self._record.last_iteration()

    def facts(self) -> JobFacts:
        """The answer to a question."""
        record, paused = self._record, self._monitors.paused
        ranks = [] if record is None else [self._rank(record, local_rank) for local_rank in record.workers]
        now_ns = time.monotonic_ns()  # after the boards were read, so that nothing on them lies in the future
        return JobFacts(
            run_id=self._line.run_id,
            launcher_pid=os.getpid(),
            log_dir=self._log_dir or "",
            started_ns=self._started_ns,
            phase=self._phase,
            cycle=None if record is None else record.cycle,
            cycle_started_ns=None if record is None else record.spawned_ns,
            nodes=self._nodes,
            world_size=self._world_size,
            max_restarts=self._line.namespace.max_restarts,
            restarts_left=self._restarts_left,
            observe_only=self._line.options.observe_only,
            paused_since_ns=paused.since_ns,
            last_cause=self._last_cause,
            ranks=make_rows(ranks, paused, now_ns),
            now_ns=now_ns,
        )

    def _rank(self, record: CycleRecord, local_rank: int) -> tuple[RankFacts, RankReading]:
        worker, rank_exit = record.workers[local_rank], record.exits.get(local_rank)
        facts = RankFacts(
            rank=record.global_ranks[local_rank],
            local_rank=local_rank,
            pid=worker.pid,
            exit_code=None if rank_exit is None else rank_exit.exitcode,
            hung=local_rank in record.hung,
        )
        stat = read_stat(worker.pid)
        state = None if stat is None or stat.state in "ZX" else stat.state
        return facts, self._monitors.reading(local_rank, record.cycle)._replace(process_state=state)
