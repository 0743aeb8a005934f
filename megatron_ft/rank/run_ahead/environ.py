"""``os.environ`` of a script that is run ahead: tells before a variable of a rank is used, or all are."""

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
    """Let ``os.environ`` tell before a variable of a rank is used, until the replacements are undone.

    ``on_use`` is called with the name before such a variable is read, looked for, set or removed; it may put it there.
    ``on_walk`` is called before code walks over all variables, ``on_copy`` before it copies them all, to look
    into the copy later, and ``on_count`` before it asks how many there are (``on_walk`` if None).
    """
    environs: tuple[Any, Any] = os.environ, os.environb
    for each in environs:
        # every use of a variable encodes its name first; frames that a traceback may show stay Python's own
        replacements.put(each, "encodekey", _telling(each.encodekey, on_use))
    for names, before in (
        (("__iter__", "__repr__"), on_walk),
        (("__len__",), on_count or on_walk),
        (("copy", "__reduce_ex__"), on_copy),  # the second is what copy.deepcopy and pickle call
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
