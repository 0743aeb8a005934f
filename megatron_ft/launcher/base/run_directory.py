"""The directory of a launcher's sockets: made at its start, recreated if it was deleted, removed at its end."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from megatron_ft.launcher.base import directories, leftover_run_dirs, lines

__all__ = ["RunDirectory"]


class Listening(Protocol):
    """Sockets in the directory."""

    def is_lost(self) -> bool:
        """Whether one was deleted."""
        ...

    def listen_again(self) -> None:
        """Recreate those that were deleted.

        Raises:
            OSError: one can't be made.
        """
        ...


class RunDirectory:
    """Of one launcher, which holds it so that no other one removes it as a leftover."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """Make it.

        Raises:
            ConfigError: there is no place for it.
        """
        self.path = directories.make_run_directory()
        self._say = say
        self._claim = leftover_run_dirs.claim(self.path)
        self._sockets: list[Listening] = []
        self._is_reported = False

    def add(self, sockets: Listening) -> None:
        """Watch over these, too."""
        self._sockets.append(sockets)

    def mend(self) -> None:
        """Recreate sockets that were deleted: ranks that are still to connect would find no monitor."""
        if not any(sockets.is_lost() for sockets in self._sockets):
            self._is_reported = False
            return
        try:
            directories.remake_run_directory(self.path)
            self._claim_anew()
            for sockets in self._sockets:
                sockets.listen_again()
            text = lines.run_dir_removed(self.path)
        except OSError as error:
            text = lines.run_dir_lost(str(error))
        if not self._is_reported:
            self._say(text)
        self._is_reported = True

    def remove(self) -> None:
        """Remove it with what is in it."""
        directories.remove_run_directory(self.path)

    def release(self) -> None:
        """Hold it no longer.

        Raises:
            OSError: the descriptor can't be closed.
        """
        held, self._claim = self._claim, None
        if held is not None:
            os.close(held)

    def _claim_anew(self) -> None:
        before, self._claim = self._claim, leftover_run_dirs.claim(self.path)
        if before is not None:
            os.close(before)
