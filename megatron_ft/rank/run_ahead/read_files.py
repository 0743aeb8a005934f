"""Changes of files that a script has read, run or looked for before its ranks are forked."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import stat
import sys
from types import ModuleType

from megatron_ft.rank.run_ahead.call_stack import is_own

_NOT_FILES = ("/proc/", "/sys/", "/dev/")
_IN_MEMORY = "/dev/shm/"  # some keep their checkpoints there
_Facts = tuple[int, ...] | None


class ReadFiles:
    """Paths, with their state when the script read them."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[bool, _Facts]] = {}

    def note(self, path: str, *, listed: bool = False) -> None:
        """Note that the script reads ``path`` now; ``listed``: it lists that directory."""
        with contextlib.suppress(OSError, ValueError, NotImplementedError):  # no working directory; no such name
            path = os.path.abspath(path)
            if path.endswith(".pyc") and "__pycache__" in path:
                path = importlib.util.source_from_cache(path)
        if path.startswith(_NOT_FILES) and not path.startswith(_IN_MEMORY):
            return
        if path not in self._seen or (listed and not self._seen[path][0]):
            self._seen[path] = listed, _facts(path, listed)

    def __len__(self) -> int:
        """Number of paths that were noted."""
        return len(self._seen)

    def note_unseen(self) -> None:
        """Note unseen reads: files that C code has mapped or opened, and modules imported before the watch."""
        with open("/proc/self/maps", errors="surrogateescape") as maps:
            paths = {words[5] for line in maps if len(words := line.rstrip("\n").split(maxsplit=5)) == 6}
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor that listed them
                paths.add(os.readlink(f"/proc/self/fd/{fd}"))
        own = {path for path in paths if path.startswith("/") and is_own(path)}
        for module in [module for module in sys.modules.values() if isinstance(module, ModuleType)]:
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and (is_own(file) or module.__name__ == "__main__"):
                own.add(file)
        for path in own:
            self.note(path)

    def changed(self) -> str | None:
        """Return a path whose file has changed since it was noted, or None."""
        for path, (listed, facts) in self._seen.items():
            if _facts(path, listed) != facts:
                return path
        return None


def _facts(path: str, listed: bool) -> _Facts:
    """Return a file's state; None if there is no such file. A directory's time counts only if it was ``listed``."""
    for look in (_stat, _lstat):  # lstat for a dangling link
        with contextlib.suppress(OSError, ValueError):
            found = look(path)
            if stat.S_ISDIR(found.st_mode):
                return (found.st_ino, found.st_mtime_ns) if listed else (found.st_ino,)
            return found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode
    return None


_stat, _lstat = os.stat, os.lstat  # the originals, before they are replaced
