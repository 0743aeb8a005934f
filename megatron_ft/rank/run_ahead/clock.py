"""Calendar time in a script that is run ahead: a name made from the clock belongs to one start of the run.

``time.time()`` alone doesn't count, because scripts and libraries measure with it; formatting it as a date does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from megatron_ft.rank.base.replacing import Replacements

_TIME = {"strftime": 1, "localtime": 0, "gmtime": 0, "ctime": 0, "asctime": 0}
"""Functions of ``time``, with the position of the argument that defaults to the current time."""
_DATETIME = ("now", "utcnow", "today", "fromtimestamp", "utcfromtimestamp")


def watch_clock(replacements: Replacements, on_read: Callable[[str], None]) -> None:
    """Call ``on_read`` with a description before the current date or time of day is read, until the replacements are
    undone.

    A time stamp taken after this call counts as the current time; an older one, as of a file, doesn't.
    """
    began_s = math.floor(time.time())

    def watched(name: str, position: int, *, always: bool = False) -> Callable[..., None]:
        def before(*arguments: Any, **_named: Any) -> None:
            given = arguments[position] if len(arguments) > position else None
            is_now = isinstance(given, (int, float)) and given >= began_s
            if always or given is None or is_now:
                on_read(f"reads the clock ({name})")

        return before

    def watch_datetime(module: Any) -> None:
        for owner in (getattr(module, "date", None), getattr(module, "datetime", None)):
            for name in _DATETIME:
                if isinstance(owner, type) and name in vars(owner):
                    before = watched(f"{owner.__name__}.{name}", 0, always=not name.endswith("fromtimestamp"))
                    replacements.replace_class_method(owner, name, before)

    for name, position in _TIME.items():
        replacements.replace(time, name, watched(f"time.{name}", position))
    replacements.when_imported("datetime", watch_datetime)
