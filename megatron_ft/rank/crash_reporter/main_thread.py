"""Where the main thread of this process is, as another of its threads sees it: nothing is sent to it."""

from __future__ import annotations

import sys
import threading

from megatron_ft.core.diagnosis.stacks import Frame

__all__ = ["main_stack"]

_MOST = 60


def main_stack() -> tuple[Frame, ...]:
    """Its calls, the innermost first, as far as these."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found: list[Frame] = []
    while frame is not None and len(found) < _MOST:
        code = frame.f_code
        found.append(Frame(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return tuple(found)
