"""``os.environ`` of a script that is run ahead: reports the use of a rank's variable beforehand."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from megatron_ft.core.run_ahead import tells_ranks_apart
from megatron_ft.rank.base.replacing import Replacements


def watch_environ(
    replacements: Replacements,
    on_use: Callable[[str], None],
    on_walk: Callable[[], None],
    on_copy: Callable[[], None],
    on_count: Callable[[], None] | None = None,
) -> None:
    """Report uses of ``os.environ`` beforehand, until the replacements are undone.

    ``on_use`` is called with the name before a rank's variable is read, looked for, set or removed; the callback may
    set it. ``on_walk`` is called before code iterates over all variables, ``on_copy`` before it copies them all,
    ``on_count`` before it counts them (``on_walk`` if None).
    """
    environs: tuple[Any, Any] = os.environ, os.environb
    for each in environs:
        # every use of a variable encodes its name first; frames in tracebacks stay Python's own
        replacements.put(each, "encodekey", _telling(each.encodekey, on_use))
    for names, before in (
        (("__iter__", "__repr__"), on_walk),
        (("__len__",), on_count or on_walk),
        (("copy", "__reduce_ex__"), on_copy),  # the second is called by copy.deepcopy and pickle
    ):
        for name in names:
            replacements.replace(type(os.environ), name, lambda *_, before=before: before())


def _telling(encode: Callable[[Any], bytes], on_use: Callable[[str], None]) -> Callable[[Any], bytes]:
    shared = {*os.environ._data}  # type: ignore[attr-defined]  # the same in all ranks, whatever their names are

    def encodekey(key: Any) -> bytes:
        name = encode(key)
        text = os.fsdecode(name)
        if name not in shared and tells_ranks_apart(text):
            on_use(text)
        return name

    return encodekey
