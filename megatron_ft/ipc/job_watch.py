"""Looking at a running job: the launcher's facts, asked for at intervals, and its ranks' boards, mapped to be read.

Nothing here waits but ``wait``, and nothing disturbs the job: the boards are memory, and the launcher answers a
question a second.
"""

from __future__ import annotations

import os
import select
import time

from megatron_ft.core.board.layout import BoardDamagedError
from megatron_ft.core.errors import FaultToleranceError, ProtocolError
from megatron_ft.core.status.job_facts import JobFacts, RankFacts
from megatron_ft.core.status.rows import RankReading
from megatron_ft.ipc.board import Board
from megatron_ft.ipc.jobs import RunningJob, launcher_socket
from megatron_ft.ipc.linux.processes import read_stat
from megatron_ft.ipc.wire import MAX_FDS, ChannelClosedError, Received, close_fds, connect

__all__ = ["ANSWER_S", "JobWatch"]

ANSWER_S = 2.0
"""So long a launcher may take for an answer before it counts as one that doesn't answer."""
_ASK_EVERY_S = 1.0
_ASK_SOONER_S = 0.2
"""While processes are gone of which the launcher had not told: another cycle may begin."""


class JobWatch:
    """One launcher, looked at from outside. ``facts`` are its last ones; None before the first answer."""

    def __init__(self, job: RunningJob) -> None:
        """Connect.

        Raises:
            FaultToleranceError: nobody is there.
        """
        self.job = job
        self.facts: JobFacts | None = None
        self._boards: dict[int, Board] = {}
        self._asked_s: float | None = None
        """When the question was sent whose answer hasn't come yet."""
        self._next_s = 0.0
        self._wanted: list[int] = []
        """Local ranks whose boards are still to be asked for."""
        try:
            self._channel = connect(launcher_socket(job), ANSWER_S)
        except (OSError, ProtocolError) as error:
            raise FaultToleranceError(f"ft_launcher {job.launcher_pid} can't be reached: {error}") from None

    def fileno(self) -> int:
        """Readable when ``step`` has something to do."""
        return self._channel.fileno()

    def step(self) -> None:
        """Take what has come, and ask what is to be asked by now. Doesn't wait.

        Raises:
            FaultToleranceError: the launcher is gone.
        """
        try:
            for received in self._channel.receive():
                self._asked_s = None
                self._take(received)
            if self._asked_s is None:
                self._ask()
        except (ChannelClosedError, ProtocolError) as error:
            raise FaultToleranceError(f"ft_launcher {self.job.launcher_pid} can't be asked: {error}") from None

    def wait(self) -> None:
        """Until the facts are known, and every board that they name.

        Raises:
            FaultToleranceError: the launcher is gone, or doesn't answer within ``ANSWER_S`` seconds.
        """
        deadline = time.monotonic() + ANSWER_S
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        while True:
            self.step()
            if self.facts is not None and self._asked_s is None:
                return
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise FaultToleranceError(self.silence())
            poller.poll(left_s * 1e3)

    def silent_s(self) -> float:
        """For how long an answer has been waited for; 0 if for none."""
        return 0.0 if self._asked_s is None else time.monotonic() - self._asked_s

    def silence(self) -> str:
        """That the launcher doesn't answer, in words, with the reason where it shows."""
        stat = read_stat(self.job.launcher_pid)
        reason = "is stopped" if stat is not None and stat.state in "Tt" else "doesn't answer"
        return f"ft_launcher {self.job.launcher_pid}, job {self.job.run_id}, {reason}"

    def readings(self) -> dict[int, RankReading]:
        """What each rank's board and process say now, by local rank."""
        if self.facts is None:
            return {}
        return {rank.local_rank: self._read(rank) for rank in self.facts.ranks}

    def close(self) -> None:
        """Give everything back; calling it again does nothing."""
        self._channel.close()
        for board in self._boards.values():
            board.close()
        self._boards.clear()

    def _ask(self) -> None:
        now_s = time.monotonic()
        if self._wanted:
            # the answers come one at a time, with as many descriptors as a message may carry
            some, self._wanted = self._wanted[:MAX_FDS], self._wanted[MAX_FDS:]
            self._channel.send({"type": "boards", "local_ranks": some})
        elif now_s >= self._next_s:
            self._channel.send({"type": "status"})
            self._next_s = now_s + _ASK_EVERY_S
        else:
            return
        self._asked_s = now_s

    def _take(self, received: Received) -> None:
        message, fds = received
        if message["type"] == "status":
            close_fds(fds)
            self.facts = JobFacts.from_message(message)
            self._keep_only({rank.board for rank in self.facts.ranks})
            ranks = (rank for rank in self.facts.ranks if rank.board is not None)
            self._wanted = [rank.local_rank for rank in ranks if rank.board not in self._boards]
            return
        try:
            for fd in fds:
                number = os.fstat(fd).st_ino
                if number not in self._boards:
                    self._boards[number] = Board(fd, writable=False)
        except (OSError, ValueError) as error:
            raise ProtocolError(f"the launcher sent what is no board ({error})") from None
        finally:
            close_fds(fds)

    def _keep_only(self, numbers: set[int | None]) -> None:
        for number in self._boards.keys() - numbers:
            self._boards.pop(number).close()

    def _read(self, rank: RankFacts) -> RankReading:
        stat = read_stat(rank.pid)
        state = None if stat is None or stat.state in "ZX" else stat.state
        if state is None and rank.exit_code is None:
            self._next_s = min(self._next_s, time.monotonic() + _ASK_SOONER_S)
        board = None if rank.board is None else self._boards.get(rank.board)
        if board is None:
            return RankReading(process_state=state)
        try:
            return RankReading(board.snapshot(), process_state=state)
        except BoardDamagedError:
            return RankReading(damaged=True, process_state=state)
