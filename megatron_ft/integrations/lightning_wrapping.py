"""Sections around methods of Lightning's objects, which has no hooks there."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from megatron_ft.rank.hooks import tolerant

__all__ = ["Sections", "Wrappings"]


class Sections:
    """Sections of one client that may be entered again while they are open: only the outermost counts.

    A save may remove another checkpoint, and a tuner trains inside a fit; neither is a mistake.
    """

    def __init__(self, client: Any) -> None:
        self._client: Any = client
        self._depth: Counter[str] = Counter()

    def is_open(self, name: str) -> bool:
        """Whether it was entered and not left."""
        return self._depth[name] > 0

    def enter(self, name: str) -> None:
        """Open it, or go one deeper."""
        if self._client is None:
            return
        self._depth[name] += 1
        if self._depth[name] == 1:
            tolerant.start_section(self._client, name)

    def leave(self, name: str) -> None:
        """Close it, or come one up; nothing if it isn't open."""
        if self._client is None or not self._depth[name]:
            return
        self._depth[name] -= 1
        if not self._depth[name]:
            tolerant.end_section(self._client, name)

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Open in a ``with`` block, and closed also when an exception passes."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave(name)

    def close_all(self) -> None:
        """Close whatever is open."""
        if self._client is not None:
            tolerant.call(self._client.end_all_sections)
        self._depth.clear()

    def retire(self) -> None:
        """Do nothing from now on."""
        self._client = None


class Wrappings:
    """Methods that are replaced on their objects, and put back afterwards."""

    def __init__(self, sections: Sections) -> None:
        self._sections = sections
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def wrap(self, owner: Any, method: str, section: str, *, after: Callable[[], None] | None = None) -> None:
        """Run ``owner.method`` inside a section, and then, if it has succeeded, ``after``."""
        original = getattr(owner, method)
        sections = self._sections

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with sections.inside(section):
                result = original(*args, **kwargs)
            if after is not None:
                after()
            return result

        before = vars(owner).get(method)
        setattr(owner, method, wrapped)
        self._replaced.append((owner, method, before, wrapped))

    def undo(self) -> None:
        """Put everything back. What other code has wrapped since stays: our part of it does nothing any more."""
        while self._replaced:
            owner, method, before, wrapped = self._replaced.pop()
            if vars(owner).get(method) is not wrapped:
                continue
            if before is None:
                delattr(owner, method)
            else:
                setattr(owner, method, before)
