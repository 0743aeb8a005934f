"""This launcher's answers to `megatron-ft status`: facts of its job, and a row for each of its ranks."""

from __future__ import annotations

import os
import socket
import time

from megatron_ft.diagnosis.launcher.slow_ranks_on_node import SlowRanksOnNode
from megatron_ft.diagnosis.waits import Lags
from megatron_ft.job.rules.restart_policy import Action
from megatron_ft.launcher.base.command_line import CommandLine
from megatron_ft.launcher.processes.monitors import Monitors
from megatron_ft.launcher.rules.agent import Agent
from megatron_ft.launcher.rules.node_cycle import NodeCycle
from megatron_ft.launcher.rules.status_rows import RankReading, make_rows
from megatron_ft.launcher.rules.turn import Options
from megatron_ft.learning.timeouts import OUT_OF_SECTION
from megatron_ft.link.base.layout import BoardSnapshot
from megatron_ft.link.facts.all_kinds import Record, Timed
from megatron_ft.link.facts.monitor import RankGone
from megatron_ft.link.facts.reported_hang import MOST_HANGS
from megatron_ft.link.linux.processes import process_began_ns, read_stat
from megatron_ft.link.messages.job_facts import (
    JobFacts,
    JobPhase,
    LastCause,
    RankRow,
    RankState,
)
from megatron_ft.records.rules.accounting import Accounting, Ledger
from megatron_ft.records.rules.metrics import GaugeValues

_LONGEST_TEXT = 2000
_SUM_NS, _SELDOM = 5_000_000_000, 50
"""Least time between two sums for metrics, and the same as a multiple of what the last one took."""


class JobStatus:
    """Answers status requests; all facts are collected on request."""

    def __init__(self, line: CommandLine, *, log_dir: str | None, monitors: Monitors) -> None:
        self._agent = Agent(Options(given=line.options, max_restarts=line.namespace.max_restarts))
        self._line = line
        self._log_dir = log_dir
        self._monitors = monitors
        self._node = socket.gethostname()
        self._started_ns = process_began_ns()
        self._ledger = Ledger(self._started_ns)
        self._accounting = Accounting()
        self._due_ns = 0
        """When to sum up next."""

    def follow(self, agent: Agent) -> None:
        """Report this agent from now on."""
        self._agent = agent

    def progress(self) -> int | None:
        """Return the number of iterations begun and collectives completed in the last cycle; None if unknown."""
        readings = self._last_readings()
        boards = [each.snapshot for each in readings if each.snapshot is not None]
        counts = [each.collectives for each in readings if each.collectives is not None]
        if not (boards or counts):
            return None
        return sum(each.iterations_seen for each in boards) + sum(each.completed for each in counts)

    def _last_readings(self) -> list[RankReading]:
        """Return the readings of the last cycle's ranks."""
        record = self._agent.started
        return [] if record is None else [self._monitors[each].reading(record.cycle) for each in record.started]

    def _boards(self) -> list[BoardSnapshot]:
        return [each.snapshot for each in self._last_readings() if each.snapshot is not None]

    def hear(self, record: Record, at_ns: int) -> None:
        """Take a record that this launcher writes to its event log."""
        self._ledger.take(Timed(at_ns, 0, "", record))

    def accounting(self, *, at_once: bool = True) -> Accounting:
        """Return the accounting up to now, with all that monitors have told.

        Unless ``at_once``, the sum may be 5 s old, or older if it takes long, and the last minute may be missing.
        """
        if at_once:
            self._monitors.hear_all()
        began_ns = time.monotonic_ns()
        if at_once or began_ns >= self._due_ns:
            for board in self._boards():
                if not board.watch_only:  # as if it had gone now: the time until then is the training's
                    gone = RankGone(
                        rank=board.rank,
                        cycle=board.cycle,
                        iteration=board.iteration,
                        last_transition_ns=board.last_transition_ns or None,
                    )
                    self._ledger.take(Timed(began_ns, 0, "", gone))
            self._accounting = self._ledger.accounting(began_ns)
            self._due_ns = began_ns + max(_SUM_NS, _SELDOM * (time.monotonic_ns() - began_ns))
        return self._accounting

    @property
    def _lags(self) -> Lags:
        slow = self._agent.part(SlowRanksOnNode)
        return Lags(-1, 0.0) if slow is None else slow.lags

    @property
    def is_spokesman(self) -> bool:
        """True if no other launcher is known to speak for the job."""
        return self._agent.printer.is_spokesman

    def readings(self, *, is_last: bool = False) -> GaugeValues:
        """Return what the metrics show of this node now; ``is_last``: however long it takes."""
        boards = self._boards()
        timeouts = [(each.name, each.timeout_ns) for board in boards for each in board.sections]
        timeouts += [(OUT_OF_SECTION, board.out_of_section_timeout_ns) for board in boards]
        return GaugeValues(
            accounting=self.accounting(at_once=is_last),
            iteration=max((each.iteration for each in boards if each.iteration is not None), default=None),
            timeouts={name: timeout_ns / 1e9 for name, timeout_ns in timeouts if timeout_ns is not None},
            nodes={self._node: self._agent.activity},
            lags=self._lags.worst,
        )

    def facts(self) -> JobFacts:
        """Return the answer to a status request."""
        agent, record, paused = self._agent, self._agent.started, self._monitors.paused
        ranks = [] if record is None else [self._rank(record, local_rank) for local_rank in record.started]
        accounting, restarts_left, last_cause = self.accounting(at_once=False), agent.restarts_left, None
        phase = JobPhase.STARTING if record is None else JobPhase.RUNNING
        if agent.ended is not None:
            phase = JobPhase.RESTARTING if agent.ended.action == Action.RESTART.value else JobPhase.ENDING
            restarts_left = agent.ended.restarts_left or 0
        if agent.failed is not None and (cause := agent.failed.cause) is not None:
            text = cause.text[:_LONGEST_TEXT]
            last_cause = LastCause(cycle=agent.failed.cycle, text=text, rank=cause.rank, kind=cause.kind.value)
        now_ns = time.monotonic_ns()  # taken after the boards were read, so that nothing on them lies in the future
        return JobFacts(
            run_id=self._line.run_id,
            launcher_pid=os.getpid(),
            log_dir=self._log_dir or "",
            started_ns=self._started_ns,
            phase=phase,
            cycle=None if record is None else record.cycle,
            cycle_started_ns=None if record is None else record.spawned_ns,
            nodes=0 if record is None else record.nodes,
            world_size=0 if record is None else record.world_size,
            max_restarts=self._line.namespace.max_restarts,
            restarts_left=restarts_left,
            observe_only=self._line.options.observe_only,
            paused_since_ns=paused.since_ns,
            last_cause=last_cause,
            goodput=None if accounting.goodput is None else accounting.goodput.share,
            hangs=accounting.hangs[-MOST_HANGS:],
            slow_ranks=self._lags.named,
            ranks=make_rows(ranks, paused, now_ns),
            now_ns=now_ns,
        )

    def _rank(self, record: NodeCycle, local_rank: int) -> tuple[RankRow, RankReading]:
        started, rank_exit = record.started[local_rank], record.exits.get(local_rank)
        row = RankRow(
            rank=record.ranks[local_rank],
            local_rank=local_rank,
            pid=started.pid or 0,
            exit_code=None if rank_exit is None else rank_exit.exitcode,
            state=RankState.HUNG if local_rank in record.hung else RankState.RUNNING,
        )
        stat = read_stat(started.pid or 0)
        state = None if stat is None or stat.state in "ZX" else stat.state
        return row, self._monitors[local_rank].reading(record.cycle)._replace(process_state=state)
