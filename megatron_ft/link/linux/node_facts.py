"""Facts of this node for its ready checks: directories, network, the kernel's log. Every function may block."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from megatron_ft.link.base.node_problems import Port

_KERNEL_LOG = "/dev/kmsg"
_LONGEST_RECORD = 8192
_LONGEST_TEXT = 4096


def try_directory(path: str) -> int:
    """Write a file in the directory and remove it. Return the free bytes.

    Raises:
        OSError: writing or removing failed.
    """
    with tempfile.NamedTemporaryFile(dir=path, prefix=".ft-node-health-") as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def look_into(path: str) -> None:
    """Ask the file system for the first entry of a directory.

    Raises:
        OSError: the directory can't be read.
    """
    with os.scandir(path) as entries:
        next(entries, None)


def mountinfo(path: str = "/proc/self/mountinfo") -> list[str]:
    """Return a line for each mount that this process sees."""
    with open(path, errors="surrogateescape") as file:
        return file.read().splitlines()


def lustre_health(sys: Path = Path("/sys")) -> str:
    """Return what Lustre says of itself; empty where there is no Lustre."""
    return _word(sys / "fs" / "lustre" / "health_check")


def beginning_of(path: str) -> str:
    """Return the first bytes of a regular file as text; empty if there is none.

    Raises:
        OSError: it can't be read.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return ""  # a pipe would wait for a writer
        with open(path, errors="replace") as file:
            return file.read(_LONGEST_TEXT)
    except FileNotFoundError:
        return ""


def interfaces_up(sys: Path = Path("/sys")) -> list[str]:
    """Return the interfaces that are up, without the loopback. State "unknown" counts as up: not all drivers report
    one."""
    states = {path.parent.name: _word(path) for path in sorted(sys.glob("class/net/*/operstate"))}
    return [name for name, state in states.items() if name != "lo" and state in ("up", "unknown")]


def ports(sys: Path = Path("/sys")) -> list[Port]:
    """Return the ports of all InfiniBand devices (and RoCE)."""
    return [
        Port(
            name=f"{path.parent.parent.name}/{path.name}",
            link=_word(path / "state").partition(": ")[2],
            cable=_word(path / "phys_state").partition(": ")[2],
        )
        for path in sorted(sys.glob("class/infiniband/*/ports/*"))
    ]


def gpu_addresses(directory: str = "/proc/driver/nvidia/gpus") -> list[str]:
    """Return the PCI addresses of NVIDIA's GPUs, "0000:3b:00", in their order; empty where there is no driver."""
    try:
        return sorted(name.partition(".")[0] for name in os.listdir(directory))
    except OSError:
        return []


def kernel_log(path: str = _KERNEL_LOG) -> list[str]:
    """Return the kernel's log, as far as it is kept; empty if this user may not read it."""
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
        pass  # not permitted after all
    finally:
        os.close(fd)
    return found


def _read(fd: int) -> bytes:
    while True:
        # records were overwritten in the meantime: continue with the next one
        with contextlib.suppress(BrokenPipeError):
            return os.read(fd, _LONGEST_RECORD)


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
