"""The jobs of this user on this node, found through the command lines of their monitors in /proc."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_ft.core.errors import FaultToleranceError, ProtocolError
from megatron_ft.core.messages.control import ANSWERS, Ok, Pause, Resume
from megatron_ft.ipc.linux.processes import all_processes
from megatron_ft.ipc.wire import Channel, ChannelClosedError, connect

__all__ = ["RunningJob", "connect_to", "find_jobs", "order"]

_LAUNCHER_SOCKET = "launcher.sock"
_ANSWER_S = 5.0


@dataclass(frozen=True, kw_only=True)
class RunningJob:
    """One launcher and its monitors."""

    launcher_pid: int
    run_id: str
    run_dir: str
    local_ranks: list[int] = field(default_factory=list)

    def describe(self) -> str:
        """For a person who has to choose."""
        count = len(self.local_ranks)
        return f"ft_launcher {self.launcher_pid}, job {self.run_id}, {count} rank{'' if count == 1 else 's'} here"


def find_jobs() -> list[RunningJob]:
    """Those that run now, by the launcher's process id."""
    jobs: dict[tuple[int, str], RunningJob] = {}
    for stat in all_processes():
        options = _monitor_options(stat.pid)
        if options is None:
            continue
        run_dir = os.path.dirname(options["--socket"])
        # a monitor outlives a launcher that was killed by moments; who has adopted it isn't one
        if str(stat.parent) != options["--parent"] or not os.path.exists(os.path.join(run_dir, _LAUNCHER_SOCKET)):
            continue
        job = RunningJob(launcher_pid=stat.parent, run_id=options["--run-id"], run_dir=run_dir)
        jobs.setdefault((stat.parent, run_dir), job).local_ranks.append(int(options["--local-rank"]))
    return sorted(jobs.values(), key=lambda job: job.launcher_pid)


def connect_to(job: RunningJob, timeout_s: float) -> Channel:
    """To where its launcher hears orders and questions. Raises FaultToleranceError: no launcher answers there."""
    try:
        return connect(os.path.join(job.run_dir, _LAUNCHER_SOCKET), timeout_s)
    except (OSError, ProtocolError) as error:
        raise FaultToleranceError(f"ft_launcher {job.launcher_pid} can't be reached: {error}") from None


def order(job: RunningJob, what: Pause | Resume) -> bool:
    """Send an order to a launcher; whether it has changed anything.

    Raises:
        FaultToleranceError: it is gone, or doesn't answer.
    """
    channel = connect_to(job, _ANSWER_S)
    try:
        channel.send(what)
        answer = ANSWERS.parse(channel.wait_message(_ANSWER_S).message)
        return not isinstance(answer, Ok) or answer.changed
    except (ChannelClosedError, ProtocolError, TimeoutError) as error:
        raise FaultToleranceError(f"ft_launcher {job.launcher_pid} doesn't answer: {error}") from None
    finally:
        channel.close()


def _monitor_options(pid: int) -> dict[str, str] | None:
    """The options of a monitor that a launcher of this user has started; None for every other process."""
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return None
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().decode(errors="surrogateescape").split("\0")[:-1]
    except OSError:
        return None  # it has ended meanwhile
    if "--launcher-fd" not in words or "--listen-fd" not in words:
        return None
    return _pairs(words[words.index("--listen-fd") :])


def _pairs(words: Sequence[str]) -> dict[str, str] | None:
    given = dict(zip(words[::2], words[1::2], strict=False))
    needed = {"--socket", "--run-id", "--parent", "--local-rank"}
    return given if needed <= given.keys() and given["--local-rank"].isdigit() else None
