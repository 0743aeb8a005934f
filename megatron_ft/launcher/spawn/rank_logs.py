"""The files of one cycle's ranks: torch's, in a directory of the cycle; none where they can't be made."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from megatron_ft.launcher.base import bounded_file_calls
from megatron_ft.launcher.spawn.cycle_output import CopiedStream, taken_from

__all__ = ["CycleLogs"]

_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_MAKE_S = 5.0
"""A file server that merely is slow, with all nodes of a job asking at once, makes a few directories in that time."""


class CycleLogs(LogsSpecs):
    """torch's log files, or those of ``--logs-specs``, for one cycle.

    torch names their directory ``attempt_N`` by the restarts that were used, and empties it first: a restart that isn't
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
        """``blocking`` returns what a function returns that may wait, and serves the launcher's loop meanwhile.

        ``prefix``: of the files that hold what all ranks of a cycle write.
        """
        super().__init__()
        self.copied: list[CopiedStream] = []
        """The ranks' streams that go to such a file."""
        self._prefix = prefix
        self._blocking = blocking
        self._specs = specs
        self._run_dir = run_dir
        self._say = say

    @property
    def root_log_dir(self) -> str:
        """As torch has it."""
        return self._specs.root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the directory and the files; ``envs``, by local rank, have FT_CYCLE, and are given the error file."""
        cycle = envs[0]["FT_CYCLE"]
        numbered = {local_rank: {**env, _ATTEMPT: cycle} for local_rank, env in envs.items()}
        files, why = None, "their directory doesn't answer"
        try:
            files = self._blocking(lambda: bounded_file_calls.call(lambda: self._made(numbered), None, bound_s=_MAKE_S))
        except OSError as error:
            why = str(error)
        if files is None:
            self._say(f"warning: could not create the ranks' log files; ranks write to the launcher's output: {why}")
            files = _no_files(len(envs))
        for local_rank, env in envs.items():
            if files.error_files[local_rank] == os.devnull:  # we still want to know why a rank ended badly
                files.error_files[local_rank] = os.path.join(self._run_dir, f"error-{cycle}-{local_rank}.json")
            env[_ERROR_FILE] = files.error_files[local_rank]
        if self._prefix is not None:
            self.copied = taken_from(files, envs, prefix=self._prefix, say=self._say)
        return files

    def _made(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The files are made now, where the ranks can still do without them.

        Raises:
            OSError: one can't be made.
        """
        files = self._specs.reify(envs)
        for name in _filtered():
            if os.path.dirname(getattr(files, name)) == os.devnull:  # as torch has it where there is no directory
                setattr(files, name, os.devnull)
        for path in {*files.stdouts.values(), *files.stderrs.values()} - {"", os.devnull}:
            with open(path, "a"):
                pass
        return files


def _filtered() -> list[str]:
    """The files of ``--duplicate-stdout-filters``; torch 2.6 has none."""
    return [name for name in ("filtered_stdout", "filtered_stderr") if name in LogsDest.__dataclass_fields__]


def _no_files(count: int) -> LogsDest:
    filtered: dict[str, Any] = dict.fromkeys(_filtered(), os.devnull)
    return LogsDest(
        stdouts=dict.fromkeys(range(count), ""),
        stderrs=dict.fromkeys(range(count), ""),
        tee_stdouts={},
        tee_stderrs={},
        error_files=dict.fromkeys(range(count), os.devnull),
        **filtered,
    )
