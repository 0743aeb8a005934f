"""How long a thread has slept: a bound on that holds on a loaded machine, too, where one on the clock doesn't."""

from __future__ import annotations

import time
from pathlib import Path

__all__ = ["asleep_s"]


def asleep_s() -> float:
    """Seconds on the clock in which this thread neither ran nor waited for a processor, from some moment on."""
    ran_ns, delayed_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return time.monotonic() - (int(ran_ns) + int(delayed_ns)) / 1e9
