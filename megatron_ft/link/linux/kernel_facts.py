"""Facts of the kernel about GPUs: their addresses, and its log. Reading either may block."""

from __future__ import annotations

import contextlib
import os

_LONGEST_RECORD = 8192


def gpu_addresses(directory: str = "/proc/driver/nvidia/gpus") -> list[str]:
    """Return the PCI addresses of NVIDIA's GPUs, "0000:3b:00", in their order; empty where there is no driver."""
    try:
        return sorted(name.partition(".")[0] for name in os.listdir(directory))
    except OSError:
        return []


def kernel_log(path: str = "/dev/kmsg") -> list[str]:
    """Return the kernel's log, as far as it is kept; empty if this user may not read it."""
    found: list[str] = []
    with contextlib.suppress(OSError):  # not permitted; or BlockingIOError: all of it is read
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while True:
                with contextlib.suppress(BrokenPipeError):  # records were overwritten: go on with the next one
                    if not (record := os.read(fd, _LONGEST_RECORD)):
                        break
                    found += record.decode(errors="replace").splitlines()
        finally:
            os.close(fd)
    return found
