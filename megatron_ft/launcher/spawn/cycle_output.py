"""``--ft-per-cycle-applog-prefix``: what all ranks of a cycle write, in one file, each line with its rank before it.

torch copies the ranks' own files line by line, as for ``--tee``; all nodes append to the same file. A directory that
can't be written, or doesn't answer, ends no job and keeps no rank waiting: the ranks' own files have every line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from torch.distributed.elastic.multiprocessing import LogsDest
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

__all__ = ["CopiedStream", "cycle_file", "taken_from"]


def cycle_file(prefix: str, cycle: int) -> str:
    """The file of a cycle: /logs/job.log becomes /logs/job_cycle3.log."""
    base, extension = os.path.splitext(prefix)
    return f"{base}_cycle{cycle}{extension or '.log'}"


def taken_from(
    files: LogsDest, envs: Mapping[int, Mapping[str, str]], *, prefix: str, say: Callable[[str], None]
) -> list[CopiedStream]:
    """What copies the ranks' streams to the file of their cycle, instead of to the launcher's output."""
    streams = [*files.tee_stdouts.items(), *files.tee_stderrs.items()]
    files.tee_stdouts, files.tee_stderrs = {}, {}
    path = cycle_file(prefix, int(envs[0]["FT_CYCLE"]))
    return [CopiedStream(source, path, rank=_shown_rank(envs[local_rank]), say=say) for local_rank, source in streams]


def _shown_rank(env: Mapping[str, str]) -> str:
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    return f"{rank:>{len(str(size - 1))}}"


class CopiedStream:
    """One of a rank's, with ``start`` and ``stop`` as torch's TailLog has them. A line is written at once, whole."""

    def __init__(self, source: str, path: str, *, rank: str, say: Callable[[str], None]) -> None:
        self._path = path
        self._rank = rank
        self._say = say
        self._fd: int | None = None
        """-1: the file can't be written."""
        self._begun = ""
        self._tail = TailLog("rank", {0: source}, self, {0: ""})  # type: ignore[arg-type]

    def start(self) -> CopiedStream:
        """Begin to copy, in a thread."""
        self._tail.start()
        return self

    def stop(self) -> None:
        """Copy the rest; the rank has ended."""
        self._tail.stop()
        if self._begun:
            self.write("\n")
        if self._fd is not None and self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def write(self, text: str) -> None:
        """Of the rank's stream, a line or a part of one."""
        self._begun += text
        if not self._begun.endswith("\n"):
            return
        line, self._begun = f"{self._rank}: {self._begun}", ""
        try:
            if self._fd is None:
                self._fd = self._open()
            if self._fd >= 0:
                os.write(self._fd, line.encode(errors="replace"))
        except OSError as error:
            self._fd = -1
            self._say(f"--ft-per-cycle-applog-prefix: {self._path} can't be written: {error.strerror}")

    def _open(self) -> int:
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
