"""The last snapshot of a life of the job, as files in the user's directory: found, replaced, and written at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from msgspec.structs import replace

from megatron_ft.errors import ConfigError
from megatron_ft.link.base.wording import counted
from megatron_ft.link.file_queue import FileQueue
from megatron_ft.memory.base import segment_files
from megatron_ft.memory.base.keeper_messages import FilesWritten, WriteFiles
from megatron_ft.memory.base.segment_files import set_name
from megatron_ft.memory.rules.retention import gigabytes
from megatron_ft.memory.rules.snapshots import EARLIER_LIFE, Kept, SavedFiles, SnapshotKey

_LOOK_S = 10.0


class SnapshotFiles:
    """One launcher's. Without a ``directory`` nothing is read and nothing written."""

    def __init__(
        self,
        directory: str | None,
        *,
        timeout_s: float,
        ranks: int,
        say: Callable[[str], None],
        announce: Callable[[str], None],
        takes_copies: bool = False,
    ) -> None:
        """``timeout_s``: for writing; ``ranks``: of this node; ``announce`` prints a line that each launcher has.

        ``takes_copies``: this node can restore what other nodes' keepers have.
        """
        self._directory = None if directory is None else os.path.abspath(directory)
        self._timeout_s = timeout_s
        self._say = say
        self._announce = announce
        self._thread = FileQueue()
        self._sets: list[tuple[SavedFiles, int | None]] = []
        reads_files = directory is not None
        self.found = Kept(local_ranks=ranks if reads_files or takes_copies else 0, reads_files=reads_files)
        """What this node can restore before the first cycle."""

    def look(self) -> None:
        """Look for what earlier lives have left; one launcher of the job does.

        Raises:
            ConfigError: the directory isn't one, or can't be used.
        """
        directory = self._directory
        if directory is None:
            return
        try:
            found = self._thread.call(lambda: segment_files.find_sets(directory), None, bound_s=_LOOK_S)
        except OSError as error:
            raise ConfigError(f"--ft-memory-checkpoint-dir {directory}: {error.strerror}") from None
        if found is None:
            self._say(f"{directory} doesn't answer: nothing is restored from it")
            return
        self._sets = found
        for files, lacking in found:
            if lacking == 0:
                self.found = replace(self.found, files=files)
                return
            number, of = files.iteration, f"{lacking} of {counted(files.world, 'rank')}"
            self._say(
                f"the memory checkpoint of iteration {number} in {directory} isn't whole ({of} missing): it isn't used"
                if lacking is not None
                else f"the memory checkpoint of iteration {number} in {directory} was written by an earlier version of "
                "megatron_ft: it isn't used"
            )

    def path_of(self, name: str) -> str:
        """Return the path of a snapshot's directory; empty without one."""
        return os.path.join(self._directory or "", name) if name and self._directory else ""

    def superseded(self, key: SnapshotKey) -> None:
        """Remove what earlier lives have left, if all ranks of the job have this snapshot, and it is newer."""
        whole, number = self.found.files, key.iteration
        if key.cycle == EARLIER_LIFE or (whole is not None and number <= whole.iteration):
            return
        # an earlier version can use its own, which may be newer than this snapshot
        names = [files.name for files, lacking in self._sets if lacking is not None or files.iteration < number]
        self._sets = [each for each in self._sets if each[0].name not in names]

        def remove() -> None:
            for name in names:
                try:
                    segment_files.remove_set(self._directory or "", name)
                except OSError as error:
                    self._say(f"{self.path_of(name)} can't be removed: {error.strerror}")

        if names:
            self._thread.do(remove)

    def order(
        self, key: SnapshotKey, world: int, life: str, *, asked_s: float | None, persistent: int | None
    ) -> WriteFiles | None:
        """Return the order to write a snapshot; None, with a line where it isn't obvious, if it isn't to be written.

        Arguments are as in `Keeper.write_files`.
        """
        if self._directory is None or key.cycle == EARLIER_LIFE:
            return None
        number = key.iteration
        if persistent is not None and persistent >= number:
            self._say(f"iteration {number} in memory isn't written: a checkpoint of iteration {persistent} is on disk")
            return None
        left_s = self._timeout_s - (0.0 if asked_s is None else time.monotonic() - asked_s)
        return WriteFiles(self._directory, set_name(number, world, life), key, max(0.0, left_s))

    def written(self, order: WriteFiles, result: FilesWritten) -> None:
        """Say what has become of an order."""
        number, path, size = order.key.iteration, self.path_of(order.name), gigabytes(result.nbytes)
        say = self._say if result.why else self._announce
        if result.why:
            say(f"iteration {number} in memory isn't written to {path}: {result.why}")
        else:
            say(f"wrote iteration {number} to {path} ({size} of this node, {result.seconds:.1f} s)")
