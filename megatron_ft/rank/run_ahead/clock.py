"""Calendar time in a script that is run ahead: a name made from the clock belongs to one start of the run.

A plain ``time.time()`` doesn't count, because scripts and libraries measure with it. To make a date of it does, and
so does reading it in a function, or at the top of a file, that makes dates: the date is of the time that was read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from megatron_ft.rank.base.replacing import Replacements
from megatron_ft.rank.run_ahead.call_stack import callers

_TIME = {"strftime": 1, "localtime": 0, "gmtime": 0, "ctime": 0, "asctime": 0}
"""Functions of ``time``, with the position of the argument that defaults to the current time."""
_DATETIME = ("now", "utcnow", "today", "fromtimestamp", "utcfromtimestamp")
_MAKE_DATES = frozenset({*_TIME, "fromtimestamp", "utcfromtimestamp"})
"""Names in the code of a function that may turn what ``time.time()`` returns into a date."""


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

    def read_time(*_arguments: Any, **_named: Any) -> None:
        reader = next(callers(), None)
        if reader is not None and not _MAKE_DATES.isdisjoint(reader.f_code.co_names):
            on_read("reads the clock (time.time)")

    replacements.replace(time, "time", read_time)
    for name, position in _TIME.items():
        replacements.replace(time, name, watched(f"time.{name}", position))
    replacements.when_imported("datetime", watch_datetime)
