"""Looking at a running job: the launcher's facts, asked for at intervals. Nothing here waits but ``wait``."""

from __future__ import annotations

import select
import time

from megatron_ft.core.errors import FaultToleranceError, ProtocolError
from megatron_ft.core.messages.control import ANSWERS, Status
from megatron_ft.core.status.job_facts import JobFacts
from megatron_ft.ipc.jobs import RunningJob, connect_to
from megatron_ft.ipc.linux.processes import read_stat
from megatron_ft.ipc.wire import ChannelClosedError, Received, close_fds

__all__ = ["ANSWER_S", "JobWatch"]

ANSWER_S = 2.0
"""So long a launcher may take for an answer before it counts as one that doesn't answer."""
_ASK_EVERY_S = 0.4


class JobWatch:
    """Asks one launcher for its facts again and again. ``facts`` are the last ones; None before the first answer."""

    def __init__(self, job: RunningJob) -> None:
        """Connect.

        Raises:
            FaultToleranceError: no launcher answers there.
        """
        self.job = job
        self.facts: JobFacts | None = None
        self._asked_s: float | None = None
        """When the question was sent whose answer hasn't come yet."""
        self._next_s = 0.0
        self._channel = connect_to(job, ANSWER_S)

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
        """Until the facts are known.

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

    def close(self) -> None:
        """Give everything back; calling it again does nothing."""
        self._channel.close()

    def _ask(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._channel.send(Status())
            self._next_s = now_s + _ASK_EVERY_S
            self._asked_s = now_s

    def _take(self, received: Received) -> None:
        close_fds(received.fds)
        answer = ANSWERS.parse(received.message)
        if isinstance(answer, JobFacts):
            self.facts = answer
