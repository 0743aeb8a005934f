"""Tells the launcher which modules a rank imports, so that the next ranks of this node find them imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["ImportRecorder"]


class ImportRecorder:
    """The first of ``sys.meta_path``: finds nothing itself, asks the others, and writes down what they found.

    One line "name<TAB>file" for each module, to a descriptor that nobody is hurt by if it is full or closed. A module
    is told of when the next one is looked for: many are only looked for, to see whether they are installed, and those
    mustn't be imported anywhere.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._found: list[ModuleSpec] = []
        os.set_blocking(fd, False)
        os.set_inheritable(fd, False)

    def install(self) -> None:
        """Begin."""
        sys.meta_path.insert(0, self)
        # a data-loader worker imports for itself
        os.register_at_fork(after_in_child=self.stop)

    def stop(self) -> None:
        """Go out of the way of all further imports."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the finders behind this one find."""
        self._tell_of_imported()
        for finder in list(sys.meta_path):
            if finder is self:
                continue
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                if self._fd >= 0 and spec.has_location and spec.origin is not None:
                    self._found.append(spec)
                return spec
        return None

    def _tell_of_imported(self) -> None:
        found, self._found = self._found, []
        names = [spec for spec in found if spec.name in sys.modules]
        text = "".join(f"{spec.name}\t{spec.origin}\n" for spec in names)
        if not text or self._fd < 0:
            return
        try:
            os.write(self._fd, text.encode(errors="surrogateescape"))
        except BlockingIOError:
            pass  # the launcher is busy or stopped: what it misses costs the next ranks an import, no more
        except OSError:
            self.stop()  # nobody wants to know any more
