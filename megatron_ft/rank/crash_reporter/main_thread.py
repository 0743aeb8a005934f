"""Where the main thread of this process is, as another of its threads sees it: nothing is sent to it."""

from __future__ import annotations

import os
import sys
import threading
import time

from megatron_ft.core.diagnosis.stacks import Frame

__all__ = ["main_places", "main_stack"]

_MOST = 60
_BETWEEN_S = 0.002


def main_stack() -> tuple[Frame, ...]:
    """Its calls, the innermost first, as far as these."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found: list[Frame] = []
    while frame is not None and len(found) < _MOST:
        code = frame.f_code
        found.append(Frame(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return tuple(found)


def main_places(samples: int) -> tuple[tuple[str, ...], ...]:
    """Where it was seen, each place once, in so many samples: more than one place shows that it moves.

    A place is the calls, the innermost first, each with the instruction it is at. Python lets another thread run only
    between two rounds of a loop or as a call begins: two samples of a thread that computes often show the same place.
    """
    found: list[tuple[str, ...]] = []
    for _ in range(samples):
        frame, place = sys._current_frames().get(threading.main_thread().ident or 0), list[str]()
        while frame is not None and len(place) < _MOST:
            file, name = os.path.basename(frame.f_code.co_filename), frame.f_code.co_name
            place.append(f"{file}:{frame.f_lineno} {name} @{frame.f_lasti}")
            frame = frame.f_back
        if tuple(place) not in found:
            found.append(tuple(place))
        time.sleep(_BETWEEN_S)
    return tuple(found)
