"""Files of one cycle's ranks: torch's, in a directory of the cycle, and one with the output of all ranks.

A directory that can't be written, or doesn't answer, ends no job and keeps no rank waiting.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from megatron_ft.launcher.base.orphan_watch import has_reader
from megatron_ft.link.base.rank_variables import ERROR_FILE_VARIABLE, OWN_ERROR_FILE_VARIABLE
from megatron_ft.link.file_queue import bounded_call
from megatron_ft.link.files.own_files import open_regular

_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
_MAKE_S = 5.0
"""Time for a slow file server, with all nodes of a job asking at once, to make a few directories."""


class CycleLogs(LogsSpecs):
    """torch's log files, or those of ``--logs-specs``, for one cycle.

    torch names their directory ``attempt_N`` by the number of restarts used, and empties it first: a restart that isn't
    counted would delete the files of the cycle before. Here N is the cycle.

    Files that can't be made (a full disk, a directory that was removed or doesn't answer) end no job: then the ranks
    write to the launcher's own output, and their error files are in ``run_dir``.
    """

    def __init__(
        self,
        specs: LogsSpecs,
        *,
        run_dir: str,
        say: Callable[[str], None],
        blocking: Callable[[Callable[[], LogsDest | None]], LogsDest | None],
        prefix: str | None = None,
    ) -> None:
        """``blocking`` runs a function that may wait, serving the launcher's loop meanwhile.

        ``prefix``: path prefix of the files with the output of all ranks of a cycle.
        """
        super().__init__()
        self.copied: list[CopiedStream] = []
        """Streams of the ranks that are copied to such a file."""
        self._prefix = prefix
        self._blocking = blocking
        self._specs = specs
        self._run_dir = run_dir
        self._say = say

    @property
    def root_log_dir(self) -> str:
        """Root of the log directories, as in torch."""
        return self._specs.root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the directory and the files; ``envs``, by local rank, have FT_CYCLE, and get the error file."""
        cycle = envs[0]["FT_CYCLE"]
        numbered = {local_rank: {**env, _ATTEMPT: cycle} for local_rank, env in envs.items()}
        files, why = None, "their directory doesn't answer"
        try:
            files = self._blocking(lambda: bounded_call(lambda: self._made(numbered), None, bound_s=_MAKE_S))
        except OSError as error:
            why = str(error)
        if files is None:
            self._say(f"warning: could not create the ranks' log files; ranks write to the launcher's output: {why}")
            files = _no_files(len(envs))
        for local_rank, env in envs.items():
            if files.error_files[local_rank] == os.devnull:  # the error file is still needed, to tell why a rank failed
                files.error_files[local_rank] = os.path.join(self._run_dir, f"error-{cycle}-{local_rank}.json")
            env[ERROR_FILE_VARIABLE] = env[OWN_ERROR_FILE_VARIABLE] = files.error_files[local_rank]
        if self._prefix is not None:
            self.copied = taken_from(files, envs, prefix=self._prefix, say=self._say)
        return files

    def _made(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the files now, while the ranks can still do without them.

        Raises:
            OSError: a file can't be made.
        """
        files = self._specs.reify(envs)
        for name in _filtered():
            if os.path.dirname(getattr(files, name)) == os.devnull:  # torch's form without a directory
                setattr(files, name, os.devnull)
        for path in {*files.stdouts.values(), *files.stderrs.values()} - {"", os.devnull}:
            with open(path, "a"):
                pass
        return files


def _filtered() -> list[str]:
    """Return the names of files of ``--duplicate-stdout-filters``; torch 2.6 has none."""
    return [name for name in ("filtered_stdout", "filtered_stderr") if name in LogsDest.__dataclass_fields__]


def inherited_streams(namespace: Namespace, ranks: int) -> frozenset[int]:
    """Return which of the launcher's own streams (1, 2) ranks write to, by torchrun's options for their log files.

    ``--tee`` counts as a file: torch copies that file in the launcher, and a rank notices no failure of the copy.
    """
    if namespace.logs_specs is not None or namespace.log_dir == os.devnull:
        return frozenset({1, 2})
    shown = set(range(ranks))
    if namespace.local_ranks_filter:  # others write nowhere
        shown &= {int(each) for each in namespace.local_ranks_filter.split(",")}
    redirected, teed = _by_rank(namespace.redirects), _by_rank(namespace.tee)
    in_files = [redirected(rank) | teed(rank) for rank in shown]
    return frozenset(fd for fd, bit in ((1, Std.OUT), (2, Std.ERR)) if any(bit not in each for each in in_files))


def _by_rank(option: str) -> Callable[[int], Std]:
    parsed = Std.from_str(str(option))
    return (lambda _rank: parsed) if isinstance(parsed, Std) else (lambda rank: parsed.get(rank, Std.NONE))


def _no_files(count: int) -> LogsDest:
    filtered: dict[str, Any] = dict.fromkeys(_filtered(), os.devnull)
    out, err = (os.devnull if has_reader(fd) is False else "" for fd in (1, 2))  # a rank would fail at its first line
    return LogsDest(
        stdouts=dict.fromkeys(range(count), out),
        stderrs=dict.fromkeys(range(count), err),
        tee_stdouts={},
        tee_stderrs={},
        error_files=dict.fromkeys(range(count), os.devnull),
        **filtered,
    )


def taken_from(
    files: LogsDest, envs: Mapping[int, Mapping[str, str]], *, prefix: str, say: Callable[[str], None]
) -> list[CopiedStream]:
    """Replace torch's copying to the launcher's output by copying to the cycle's file. Return the copiers.

    The file of cycle 3 is /logs/job_cycle3.log for the ``prefix`` /logs/job.log, or /logs/job. torch copies the ranks'
    own files line by line, as for ``--tee``; all nodes append to the same file.
    """
    streams = [*files.tee_stdouts.items(), *files.tee_stderrs.items()]
    files.tee_stdouts, files.tee_stderrs = {}, {}
    base, extension = os.path.splitext(prefix)
    path = f"{base}_cycle{envs[0]['FT_CYCLE']}{extension or '.log'}"
    ranks = {each: env["RANK"].rjust(len(str(int(env["WORLD_SIZE"]) - 1))) for each, env in envs.items()}
    return [CopiedStream(source, path, rank=ranks[local_rank], say=say) for local_rank, source in streams]


class CopiedStream:
    """Copier of one stream of a rank; each line is prefixed with the rank, and written at once and whole.

    ``start`` and ``stop`` are as in torch's TailLog. If the file can't be written, the rank's own has every line.
    """

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
        """Copy the rest, once the rank has ended."""
        self._tail.stop()
        if self._begun:
            self.write("\n")
        if self._fd is not None and self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def write(self, text: str) -> None:
        """Take a line, or part of one, of the rank's stream."""
        self._begun += text
        if not self._begun.endswith("\n"):
            return
        line, self._begun = f"{self._rank}: {self._begun}", ""
        try:
            if self._fd is None:
                os.makedirs(os.path.dirname(self._path), exist_ok=True)
                self._fd = open_regular(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            if self._fd >= 0:
                os.write(self._fd, line.encode(errors="replace"))
        except OSError as error:
            self._fd = -1
            self._say(f"--ft-per-cycle-applog-prefix: {self._path} can't be written: {error.strerror}")
