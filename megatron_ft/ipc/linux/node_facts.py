"""Facts of this node for its ready checks: directories, network, the kernel's log. To ask for each may block."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from megatron_ft.core.node_health import Port

_KERNEL_LOG = "/dev/kmsg"
_LONGEST_RECORD = 8192


def try_directory(path: str) -> int:
    """Write a file there and remove it. Free bytes.

    Raises:
        OSError: that can't be done.
    """
    with tempfile.NamedTemporaryFile(dir=path, prefix=".ft-node-health-") as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def interfaces_up(sys: Path = Path("/sys")) -> list[str]:
    """But for the loopback. A state that the kernel doesn't know counts: not all drivers tell."""
    states = {path.parent.name: _word(path) for path in sorted(sys.glob("class/net/*/operstate"))}
    return [name for name, state in states.items() if name != "lo" and state in ("up", "unknown")]


def ports(sys: Path = Path("/sys")) -> list[Port]:
    """Of all InfiniBand devices (and RoCE)."""
    return [
        Port(
            name=f"{path.parent.parent.name}/{path.name}",
            link=_word(path / "state").partition(": ")[2],
            cable=_word(path / "phys_state").partition(": ")[2],
        )
        for path in sorted(sys.glob("class/infiniband/*/ports/*"))
    ]


def kernel_log(path: str = _KERNEL_LOG) -> list[str]:
    """Since the node booted, or since what is left of that; empty where this user may not read it."""
    found: list[str] = []
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return found
    try:
        with contextlib.suppress(BlockingIOError):
            while record := _read(fd):
                found += record.decode(errors="replace").splitlines()
    except OSError:
        pass  # not allowed after all
    finally:
        os.close(fd)
    return found


def _read(fd: int) -> bytes:
    while True:
        with contextlib.suppress(BrokenPipeError):  # records were overwritten meanwhile: the next one follows
            return os.read(fd, _LONGEST_RECORD)


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
