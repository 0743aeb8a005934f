"""``LOG_DIR/coordinator.json``: where the job is coordinated, for launchers that find no process at its endpoint.

Useful only on nodes that share the directory. What it names is one more address to try: the coordinator there decides
which launchers it lets in.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable

from megatron_ft.core.codec import Fact, Int, decode, encode
from megatron_ft.core.errors import ProtocolError
from megatron_ft.ipc.files.own_files import read_own, replace_own
from megatron_ft.link.reactor import Reactor

_VERSION = 1


class CoordinatorNote(Fact, frozen=True, kw_only=True):
    """Content of the file. ``decision``: number of the job's last decision that was made there."""

    version: Int = _VERSION
    job: str
    address: str
    decision: Int


class CoordinatorFile:
    """The file of one job. Its directory may be silent: each read and write has a thread, and is one at a time."""

    def __init__(self, reactor: Reactor, log_dir: str | None, job: str) -> None:
        self._reactor = reactor
        self._path = None if log_dir is None else os.path.join(log_dir, "coordinator.json")
        self._job = job
        self._wanted: bytes | None = None
        """Content to write once the write in progress is over."""
        self._is_writing = self._is_reading = False

    def write(self, address: str, decision: int) -> None:
        """Name this address, unless the path holds something else than a regular file of this user."""
        note = CoordinatorNote(job=self._job, address=address, decision=decision)
        self._wanted = encode(note) + b"\n"
        self._write_wanted()

    def _write_wanted(self) -> None:
        data = self._wanted
        if data is None or self._path is None or self._is_writing:
            return
        self._wanted, self._is_writing = None, True
        with contextlib.suppress(OSError, RuntimeError):  # no descriptor or thread is free: the file is optional
            self._reactor.call_in_thread(functools.partial(replace_own, self._path, data), self._written)
            return
        self._is_writing = False

    def _written(self, result: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):
            result()
        self._is_writing = False
        self._write_wanted()

    def read(self, named: Callable[[str], None]) -> None:
        """Call ``named`` with the address, if the file is of this job and this user."""
        if self._path is None or self._is_reading:
            return
        self._is_reading = True
        with contextlib.suppress(OSError, RuntimeError):
            self._reactor.call_in_thread(
                functools.partial(_address, self._path, self._job), functools.partial(self._read, named)
            )
            return
        self._is_reading = False

    def _read(self, named: Callable[[str], None], result: Callable[[], str]) -> None:
        self._is_reading = False
        try:
            address = result()
        except (OSError, ValueError, ProtocolError):
            return  # the file is optional
        named(address)


def _address(path: str, job: str) -> str:
    """Return the address in the file.

    Raises:
        OSError: the file can't be read, or isn't a regular one of this user.
        ValueError, ProtocolError: its content isn't a note of this job.
    """
    note = decode(CoordinatorNote, read_own(path))
    if note.version != _VERSION or note.job != job:
        raise ValueError("of another job, or version")
    return note.address
