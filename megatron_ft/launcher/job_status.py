"""What this launcher tells `megatron-ft status`: the facts of its job, and its ranks' boards, only to be read."""

from __future__ import annotations

import os
import time
from typing import Any

from megatron_ft.core.diagnosis.exits import Cause
from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.job.restart_policy import Action, Decision
from megatron_ft.core.status.job_facts import JobFacts, LastCause, Phase, RankFacts
from megatron_ft.ipc.wire import MAX_FDS, Channel, Message, close_fds
from megatron_ft.launcher.arguments import CommandLine
from megatron_ft.launcher.cycle.cycle_record import CycleRecord
from megatron_ft.launcher.monitors.monitors import Monitors

__all__ = ["JobStatus"]

_LONGEST_TEXT = 2000
_SEND_S = 0.0
"""An answer fits into the socket; a peer that doesn't read doesn't hold the launcher up, it is dropped."""
_MOST_PAUSES = 1000


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

    def answer(self, question: Message, channel: Channel) -> None:
        """Answer "status" with the facts, and "boards" with the boards of the ``local_ranks`` that have one.

        Raises:
            ChannelClosedError: who asked is gone, or doesn't read.
            ProtocolError: it isn't a question that can be answered.
        """
        if question["type"] == "status":
            channel.send({"type": "status", **self._facts().to_message()}, timeout_s=_SEND_S)
            return
        boards = self._boards(question.get("local_ranks"))
        try:
            channel.send({"type": "boards"}, tuple(boards), timeout_s=_SEND_S)
        finally:
            close_fds(boards)

    def _facts(self) -> JobFacts:
        now_ns, record, paused = time.monotonic_ns(), self._record, self._monitors.paused
        began_ns = 0 if record is None else record.met_ns
        # earlier ones are no time of any board that there is
        pauses = [span for span in paused.spans(now_ns) if span[1] > began_ns]
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
            pauses=tuple(pauses[-_MOST_PAUSES:]),
            last_cause=self._last_cause,
            ranks=() if record is None else tuple(self._rank(record, local_rank) for local_rank in record.workers),
        )

    def _rank(self, record: CycleRecord, local_rank: int) -> RankFacts:
        worker, rank_exit = record.workers[local_rank], record.exits.get(local_rank)
        board_fd = self._monitors.board_fd(local_rank, record.cycle)
        return RankFacts(
            rank=record.global_ranks[local_rank],
            local_rank=local_rank,
            pid=worker.pid,
            exit_code=None if rank_exit is None else rank_exit.exitcode,
            hung=local_rank in record.hung,
            board=None if board_fd is None else os.fstat(board_fd).st_ino,
        )

    def _boards(self, local_ranks: Any) -> list[int]:
        """Descriptors of boards, opened anew: through these nobody can write. Which is which, their inode says."""
        record = self._record
        are_numbers = isinstance(local_ranks, list) and all(isinstance(each, int) for each in local_ranks)
        if not are_numbers or len(local_ranks) > MAX_FDS:
            raise ProtocolError(f"a question for boards names at most {MAX_FDS} local ranks")
        if record is None:
            return []
        opened: list[int] = []
        for each in record.workers.keys() & set(local_ranks):
            fd = self._monitors.board_fd(each, record.cycle)
            if fd is None:
                continue
            try:
                opened.append(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
            except OSError:
                break  # out of descriptors: those that could be opened go out, the others are asked for again
        return opened
