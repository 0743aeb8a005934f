"""The last snapshot of a life of the job, as files in the user's directory: found, replaced, and written at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from megatron_ft.errors import ConfigError, SnapshotError
from megatron_ft.link.base.wording import counted
from megatron_ft.link.file_queue import FileQueue
from megatron_ft.link.reactor import Reactor
from megatron_ft.memory.base import segment_files
from megatron_ft.memory.base.segment_files import set_name
from megatron_ft.memory.rules.retention import gigabytes
from megatron_ft.memory.rules.snapshots import EARLIER_LIFE, Kept, SavedFiles, SnapshotKey

_LOOK_S = 10.0
_REMOVE_S = 1.0
"""Seconds that a thread has to remove what it couldn't write in time."""


class SnapshotFiles:
    """One launcher's. Without a ``directory`` nothing is read and nothing written."""

    def __init__(
        self,
        directory: str | None,
        reactor: Reactor,
        *,
        timeout_s: float,
        ranks: int,
        say: Callable[[str], None],
        say_everywhere: Callable[[str], None],
    ) -> None:
        """``timeout_s``: for writing; ``ranks``: as in `Kept`; ``say_everywhere`` prints lines that each node has."""
        self._directory = None if directory is None else os.path.abspath(directory)
        self._reactor = reactor
        self._timeout_s = timeout_s
        self._say = say
        self._say_everywhere = say_everywhere
        self._thread = FileQueue()
        self._sets: list[tuple[SavedFiles, int]] = []
        self.found = Kept(local_ranks=ranks, reads_files=directory is not None)
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
            what = f"the memory checkpoint of iteration {files.iteration} in {directory}"
            of = f"{lacking} of {counted(files.world, 'rank')} missing"
            self._say(f"{what} isn't whole ({of}), or is of an earlier version: it isn't used")

    def path_of(self, name: str) -> str:
        """Return the path of a snapshot's directory; empty without one."""
        return os.path.join(self._directory or "", name) if name and self._directory else ""

    def superseded(self, key: SnapshotKey) -> None:
        """Remove all that earlier lives have left once all ranks have a newer snapshot than the set that was chosen."""
        number, files = key.iteration, self.found.files  # sets of later iterations are of a timeline that was abandoned
        if key.cycle == EARLIER_LIFE:
            return
        names = [each.name for each, _ in self._sets if (files or each).iteration < number]
        self._sets = [each for each in self._sets if each[0].name not in names]

        def remove() -> None:
            for name in names:
                try:
                    segment_files.remove_set(self._directory or "", name)
                except OSError as error:
                    self._say(f"{self.path_of(name)} can't be removed: {error.strerror}")

        if names:
            self._thread.do(remove)

    def write(
        self,
        key: SnapshotKey,
        world: int,
        segments: Mapping[int, int],
        life: str,
        *,
        asked_s: float | None,
        persistent: int | None,
        is_hurried: Callable[[], bool],
    ) -> None:
        """Write the segments of a snapshot, by rank, -1 for a missing one, and say what has become of it.

        Args:
            life: text that no other life of the job has.
            asked_s: time of the signal that stops the job (time.monotonic); None: it ends by itself.
            persistent: iteration of the last checkpoint on disk; None if it isn't known.
            is_hurried: returns True if nothing is to be waited for any more.
        """
        if self._directory is None or key.cycle == EARLIER_LIFE:
            return
        number, directory, name = key.iteration, self._directory, set_name(key.iteration, world, life)
        if persistent is not None and persistent >= number:
            self._say(f"iteration {number} in memory isn't written: a checkpoint of iteration {persistent} is on disk")
            return
        began_s = time.monotonic()
        until_s = max(began_s, (began_s if asked_s is None else asked_s) + self._timeout_s)
        why = "there was no more time"

        def check(late_s: float = 0.0) -> None:
            nonlocal until_s, why
            if is_hurried():
                until_s, why = min(until_s, time.monotonic()), "a second signal asked to stop"
            if time.monotonic() >= until_s + late_s:
                raise SnapshotError(why)

        try:
            lacking = [rank for rank, fd in segments.items() if fd < 0]
            if lacking:
                raise SnapshotError(f"there is no segment of rank {lacking[0]}")
            # a thread that is late removes what it has written; a disk that doesn't answer isn't waited for
            nbytes = self._reactor.call_blocking(
                lambda: segment_files.write(directory, name, segments, check), lambda: check(_REMOVE_S)
            )
        except (OSError, SnapshotError, RuntimeError, MemoryError) as error:  # no thread, or no memory for its buffers
            text = getattr(error, "strerror", None) or error
            self._say(f"iteration {number} in memory isn't written to {self.path_of(name)}: {text}")
            return
        took_s, size = time.monotonic() - began_s, gigabytes(nbytes)
        self._say_everywhere(f"wrote iteration {number} to {self.path_of(name)} ({size} of this node, {took_s:.1f} s)")
