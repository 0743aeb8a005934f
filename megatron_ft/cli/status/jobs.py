"""Running jobs of this user on this node, found by the command lines of their monitors in /proc."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TypeVar

from megatron_ft.errors import ConfigError, FaultToleranceError, ProtocolError
from megatron_ft.link.base.codec import Message, Vocabulary
from megatron_ft.link.base.wording import counted
from megatron_ft.link.linux.processes import all_processes, read_stat
from megatron_ft.link.messages.control_messages import ANSWERS, Ok, PauseDetection, ResumeDetection, Status
from megatron_ft.link.messages.job_facts import JobFacts, RankRow
from megatron_ft.link.messages.rank_messages import SHOWN, RankRefused, ShowRank
from megatron_ft.link.wire import Channel, ChannelClosedError, connect

_ORDER_S = 5.0
_Answer = TypeVar("_Answer")
ANSWER_S = 2.0
"""Seconds to wait for a launcher's answer."""


@dataclass(frozen=True, kw_only=True)
class RunningJob:
    """One launcher and its monitors."""

    launcher_pid: int
    run_id: str
    socket: str
    """Path of the launcher's control socket."""
    monitors: dict[int, str] = field(default_factory=dict)
    """Sockets of its monitors, by local rank."""

    @property
    def launcher(self) -> str:
        return f"ft_launcher {self.launcher_pid}"

    def describe(self) -> str:
        """Return one line for a person who has to choose."""
        return f"{self.launcher}, job {self.run_id}, {counted(len(self.monitors), 'rank')} here"


def find_jobs() -> list[RunningJob]:
    """Return the running jobs, sorted by the launcher's process id."""
    jobs: dict[tuple[int, str], RunningJob] = {}
    for stat in all_processes():
        options = _monitor_options(stat.pid)
        if options is None:
            continue
        socket = os.path.join(os.path.dirname(options["--socket"]), "launcher.sock")
        # a monitor outlives a killed launcher for moments; its new parent is no launcher
        if str(stat.parent) == options["--parent"] and os.path.exists(socket):
            job = RunningJob(launcher_pid=stat.parent, run_id=options["--run-id"], socket=socket)
            jobs.setdefault((stat.parent, socket), job).monitors[int(options["--local-rank"])] = options["--socket"]
    return sorted(jobs.values(), key=lambda job: job.launcher_pid)


def choose(jobs: list[RunningJob], *, run_id: str | None, pid: int | None) -> list[RunningJob]:
    """Return the launchers that are meant: of one job, usually one on each node.

    Raises:
        ConfigError: the choice is ambiguous, or there is no such job; lists the running ones.
    """
    listed = "".join(f"; {job.describe()}" for job in jobs)
    if run_id is not None or pid is not None:
        chosen = [job for job in jobs if pid in (None, job.launcher_pid) and run_id in (None, job.run_id)]
        if not chosen:
            wanted = f"--pid {pid}" if run_id is None else f"--job {run_id}"
            raise ConfigError(f"no ft_launcher of yours on this node has {wanted}{listed}")
        return chosen
    if len(jobs) > 1:
        raise ConfigError(f"several jobs run on this node, choose one with --pid or --job{listed}")
    return jobs


def _ask(path: str, question: Message, answers: Vocabulary[_Answer], who: str) -> _Answer:
    """Ask at a socket. Raises FaultToleranceError: ``who`` can't be reached, or doesn't answer."""
    channel = _connect(path, _ORDER_S, who)
    try:
        channel.send(question)
        return answers.parse(channel.wait_message(_ORDER_S).message)
    except (ChannelClosedError, ProtocolError, TimeoutError) as error:
        raise FaultToleranceError(f"{who} doesn't answer: {error}") from None
    finally:
        channel.close()


def _connect(path: str, timeout_s: float, who: str) -> Channel:
    try:
        return connect(path, timeout_s)
    except (OSError, ProtocolError) as error:
        raise FaultToleranceError(f"{who} can't be reached: {error}") from None


def order(job: RunningJob, what: PauseDetection | ResumeDetection) -> bool:
    """Send an order to a launcher. Return True if it changed anything.

    Raises:
        FaultToleranceError: the launcher is gone, or doesn't answer.
    """
    answer = _ask(job.socket, what, ANSWERS, job.launcher)
    return not isinstance(answer, Ok) or answer.changed


def running_ranks(job: RunningJob) -> list[RankRow]:
    """Return the ranks that a launcher says have not exited.

    Raises:
        FaultToleranceError: the launcher is gone, or doesn't answer.
    """
    watch = JobWatch(job)
    watch.close()
    return [row for row in watch.facts.ranks if row.exit_code is None]


def show_rank(job: RunningJob, local_rank: int) -> str:
    """Return what a rank does now, as text.

    Raises:
        FaultToleranceError: its monitor is gone, doesn't answer, or watches no rank; the text says which.
    """
    answer = _ask(job.monitors.get(local_rank, ""), ShowRank(), SHOWN, "its monitor")
    if isinstance(answer, RankRefused):
        raise FaultToleranceError(answer.reason)
    return answer.text


class JobWatch:
    """Asks one launcher for its facts. ``facts`` are the last answer."""

    facts: JobFacts

    def __init__(self, job: RunningJob) -> None:
        """Connect, and ask for the first time.

        Raises:
            FaultToleranceError: no launcher answers there within ``ANSWER_S`` seconds.
        """
        self.job = job
        self._asked_s: float | None = None
        """Time of the question whose answer hasn't come yet."""
        self._channel = _connect(job.socket, ANSWER_S, job.launcher)
        try:
            if not self.ask(ANSWER_S):
                raise FaultToleranceError(self.silence())
        except FaultToleranceError:
            self.close()
            raise

    def ask(self, bound_s: float) -> bool:
        """Ask, and wait for the answer. Return False if it hasn't come within ``bound_s``: the next call waits on.

        Raises:
            FaultToleranceError: the launcher is gone.
        """
        try:
            if self._asked_s is None:
                self._channel.send(Status())
                self._asked_s = time.monotonic()
            answer = ANSWERS.parse(self._channel.wait_message(bound_s).message)
        except TimeoutError:
            return False
        except (ChannelClosedError, ProtocolError) as error:
            raise FaultToleranceError(f"{self.job.launcher} can't be asked: {error}") from None
        self._asked_s = None
        if isinstance(answer, JobFacts):
            self.facts = answer
        return True

    def silent_s(self) -> float:
        """Return the seconds an answer has been overdue; 0 if no question is open."""
        return 0.0 if self._asked_s is None else time.monotonic() - self._asked_s

    def silence(self) -> str:
        """Return a line that the launcher doesn't answer, with the reason if it is known."""
        stat = read_stat(self.job.launcher_pid)
        reason = "is stopped" if stat is not None and stat.state in "Tt" else "doesn't answer"
        return f"{self.job.launcher}, job {self.job.run_id}, {reason}"

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._channel.close()


def _monitor_options(pid: int) -> dict[str, str] | None:
    """Return the options of a monitor that a launcher of this user has started; None for every other process."""
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return None
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().decode(errors="surrogateescape").split("\0")[:-1]
    except OSError:
        return None  # it has ended in the meantime
    if "--launcher-fd" not in words or "--listen-fd" not in words:
        return None
    del words[: words.index("--listen-fd")]
    given = dict(zip(words[::2], words[1::2], strict=False))
    needed = {"--socket", "--run-id", "--parent", "--local-rank"}
    return given if needed <= given.keys() and given["--local-rank"].isdigit() else None
