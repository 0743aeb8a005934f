"""``os.environ`` of a script that is run ahead: the same object, which tells before a variable of a rank is used."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from megatron_ft.core.run_ahead import tells_ranks_apart
from megatron_ft.rank.base.replacing import Replacements

__all__ = ["watch_environ"]


def watch_environ(
    replacements: Replacements, on_use: Callable[[str], None], on_walk: Callable[[], None], on_copy: Callable[[], None]
) -> None:
    """Begin; it ends when the replacements are undone.

    ``on_use`` is called with the name before such a variable is read, looked for, set or removed; it may put it there.
    ``on_walk`` is called before code walks over all variables, ``on_copy`` before it copies them all, to look
    into the copy later.
    """
    environs: tuple[Any, Any] = os.environ, os.environb
    for each in environs:
        # every use of a variable encodes its name first; frames that a traceback may show stay Python's own
        replacements.put(each, "encodekey", _telling(each.encodekey, on_use))
    for name in ("__iter__", "__len__", "__repr__"):
        replacements.replace(type(os.environ), name, lambda _environ: on_walk())
    replacements.replace(type(os.environ), "copy", lambda _environ: on_copy())


def _telling(encode: Callable[[Any], bytes], on_use: Callable[[str], None]) -> Callable[[Any], bytes]:
    shared = {*os.environ._data}  # type: ignore[attr-defined]  # the same in all ranks, whatever their names are

    def encodekey(key: Any) -> bytes:
        name = encode(key)
        text = os.fsdecode(name)
        if name not in shared and tells_ranks_apart(text):
            on_use(text)
        return name

    return encodekey
