"""Sections around methods of Lightning, where it has no hooks."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from megatron_ft.rank.hooks import safe_calls


class Sections:
    """Reentrant sections of one client, and the methods that run in them, until ``end``.

    Only the outermost entry counts: a save may remove another checkpoint, and a tuner trains inside a fit.
    """

    def __init__(self, client: Any) -> None:
        self._client: Any = client
        self._depth: Counter[str] = Counter()
        self._wrapped: list[tuple[Any, str, Any, Any]] = []

    def is_open(self, name: str) -> bool:
        return self._depth[name] > 0

    def enter(self, name: str) -> None:
        """Open the section, or increase its depth."""
        self._depth[name] += 1
        if self._depth[name] == 1 and self._client is not None:
            safe_calls.start_section(self._client, name)

    def leave(self, name: str) -> None:
        """Decrease the section's depth, closing it at 0; do nothing if it isn't open."""
        if not self._depth[name]:
            return
        self._depth[name] -= 1
        if not self._depth[name] and self._client is not None:
            safe_calls.end_section(self._client, name)

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Keep the section open in a ``with`` block, also when an exception passes."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave(name)

    def wrap(self, owner: Any, method: str, section: str, *, after: Callable[[], None] | None = None) -> None:
        """Run ``owner.method`` inside a section, and then, if it succeeds, ``after``."""
        original = getattr(owner, method)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self.inside(section):
                result = original(*args, **kwargs)
            if after is not None:
                after()
            return result

        self._wrapped.append((owner, method, vars(owner).get(method), wrapped))
        setattr(owner, method, wrapped)

    def close_all(self) -> None:
        safe_calls.call(self._client.end_all_sections)
        self._depth.clear()

    def end(self) -> None:
        """Restore the methods. A wrapper that other code has wrapped since stays, but has no effect."""
        self._client = None
        while self._wrapped:
            owner, method, before, wrapped = self._wrapped.pop()
            if vars(owner).get(method) is not wrapped:
                continue
            if before is None:
                delattr(owner, method)
            else:
                setattr(owner, method, before)
