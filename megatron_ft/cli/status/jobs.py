"""Running jobs of this user on this node, found by the command lines of their monitors in /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TypeVar

from megatron_ft.errors import ConfigError, FaultToleranceError, ProtocolError
from megatron_ft.link.base.codec import Message, Vocabulary
from megatron_ft.link.base.wording import counted
from megatron_ft.link.linux.processes import all_processes, read_stat
from megatron_ft.link.messages.control_messages import ANSWERS, Ok, Status
from megatron_ft.link.messages.job_facts import JobFacts, RankRow
from megatron_ft.link.messages.rank_messages import SHOWN, RankRefused, ShowRank
from megatron_ft.link.wire import ChannelClosedError, connect

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


class SilentError(FaultToleranceError):
    """A launcher or monitor that hasn't answered in time."""


def _ask(path: str, question: Message, answers: Vocabulary[_Answer], who: str, bound_s: float = _ORDER_S) -> _Answer:
    """Ask at a socket. Raises FaultToleranceError: ``who`` can't be reached, or doesn't answer."""
    try:
        channel = connect(path, bound_s)
    except (OSError, ProtocolError) as error:
        raise FaultToleranceError(f"{who} can't be reached: {error}") from None
    try:
        channel.send(question)
        return answers.parse(channel.wait_message(bound_s).message)
    except TimeoutError as error:
        raise SilentError(f"{who} doesn't answer: {error}") from None
    except (ChannelClosedError, ProtocolError) as error:
        raise FaultToleranceError(f"{who} doesn't answer: {error}") from None
    finally:
        channel.close()


def facts_of(job: RunningJob) -> JobFacts:
    """Return the facts of a launcher.

    Raises:
        SilentError: it hasn't answered within ``ANSWER_S`` seconds; one line, with the reason if it is known.
        FaultToleranceError: it is gone.
    """
    try:
        answer = _ask(job.socket, Status(), ANSWERS, job.launcher, ANSWER_S)
    except SilentError:
        stat = read_stat(job.launcher_pid)
        reason = "is stopped" if stat is not None and stat.state in "Tt" else "doesn't answer"
        raise SilentError(f"{job.launcher}, job {job.run_id}, {reason}") from None
    if not isinstance(answer, JobFacts):
        raise FaultToleranceError(f"{job.launcher} doesn't answer: {answer}")
    return answer


def order(job: RunningJob, what: Message) -> bool:
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
    return [row for row in facts_of(job).ranks if row.exit_code is None]


def show_rank(job: RunningJob, local_rank: int) -> str:
    """Return what a rank does now, as text.

    Raises:
        FaultToleranceError: its monitor is gone, doesn't answer, or watches no rank; the text says which.
    """
    answer = _ask(job.monitors.get(local_rank, ""), ShowRank(), SHOWN, "its monitor")
    if isinstance(answer, RankRefused):
        raise FaultToleranceError(answer.reason)
    return answer.text


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
