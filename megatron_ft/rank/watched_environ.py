"""``os.environ`` of a script that is run ahead: the same object, which tells before a variable of a rank is used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from megatron_ft.core.preload import tells_ranks_apart

__all__ = ["watch_environ"]


def watch_environ(
    on_use: Callable[[str], None], on_walk: Callable[[], None], on_copy: Callable[[], None]
) -> Callable[[], None]:
    """Begin; what is returned ends it.

    ``on_use`` is called with the name before such a variable is read, looked for, set or removed; it may put it there.
    ``on_walk`` is called before anybody walks over all variables, ``on_copy`` before somebody copies them all, to look
    into the copy later.
    """
    original = type(os.environ)

    # each calls the original by name: when it goes on in a rank, its object isn't of this class any more
    class Watched(original):  # type: ignore[misc,valid-type]
        def __iter__(self) -> Iterator[Any]:
            on_walk()
            return original.__iter__(self)

        def copy(self) -> dict[Any, Any]:
            on_copy()
            return original.copy(self)

        def __len__(self) -> int:
            on_walk()
            return original.__len__(self)

        def __repr__(self) -> str:
            on_walk()
            return original.__repr__(self)

    Watched.__name__, Watched.__qualname__, Watched.__module__ = "_Environ", "_Environ", "os"
    encoders: list[tuple[Any, Any]] = []
    each: Any
    for each in (os.environ, os.environb):
        # every use of a variable encodes its name first; frames that a traceback may show stay Python's own
        encoders.append((each, each.encodekey))
        each.encodekey = _telling(each.encodekey, on_use)
        each.__class__ = Watched

    def end() -> None:
        for environ, encode in encoders:
            environ.encodekey = encode
            environ.__class__ = original

    return end


def _telling(encode: Callable[[Any], bytes], on_use: Callable[[str], None]) -> Callable[[Any], bytes]:
    shared = {*os.environ._data}  # type: ignore[attr-defined]  # the same in all ranks, whatever their names are

    def encodekey(key: Any) -> bytes:
        name = encode(key)
        text = os.fsdecode(name)
        if name not in shared and tells_ranks_apart(text):
            on_use(text)
        return name

    return encodekey
