"""Checks of ``megatron-ft node-health``: what is wrong with what they found.

A node is refused only for what is certain. A fact that can't be determined is no problem, unless the user asked for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ft.errors import Refused, nearest
from megatron_ft.link.base.wording import counted

CHECKS = ("gpu", "disk", "net", "storage", "mounts", "segment", "nvidia-smi")
DIRECTORIES_VARIABLE = "FT_JOB_DIRECTORIES"
"""Directories that the job writes to, for the health command of a launcher; separated by colons."""
LEAST_FREE_BYTES = 1 << 30
"""Free bytes required in each checked directory."""
_OF_THE_PROGRAM = frozenset({13, 31, 43, 45, 63, 94})
"""Xids caused by a program's error, or repaired: they say nothing about the device."""
_ACTIVE, _CABLE = "ACTIVE", "LinkUp"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Driver's report of one device; None is what it doesn't report for this kind.

    Args:
        pages_pending: pages of its memory will be retired at the next reset.
        rows_pending: rows will be remapped at the next reset, on newer devices.
        rows_failed: rows couldn't be replaced.
    """

    index: int
    pages_pending: bool | None = None
    rows_pending: bool | None = None
    rows_failed: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Port:
    """Port of an InfiniBand device: state of its link and cable, as in ``/sys/class/infiniband``."""

    name: str
    link: str
    cable: str


def parse_checks(text: str) -> tuple[str, ...]:
    """Return the names of checks; ``disk:PATH`` and ``storage:PATH`` check one more directory.

    Raises:
        Refused: a check is unknown.
    """
    checks = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for check in checks:
        name, colon, path = check.partition(":")
        if name not in CHECKS:
            raise Refused(nearest(name, CHECKS))
        if colon and (name not in ("disk", "storage") or not path.startswith("/")):
            raise Refused(f"; {check!r}: only disk and storage have a path, as in storage:/checkpoints")
    return checks


def gpu_problems(gpus: Sequence[Gpu] | None, kernel_log: Iterable[str], *, ranks: int) -> list[str]:
    """Return problems of the devices; ``gpus`` None: no driver. Each of the node's ``ranks`` needs a device."""
    if gpus is None:
        return ["gpu: there is no NVIDIA driver (libnvidia-ml.so.1)"]
    found = []
    if len(gpus) < ranks:
        found.append(f"gpu: {counted(len(gpus), 'device')} for {counted(ranks, 'rank')}")
    for gpu in gpus:
        if gpu.pages_pending or gpu.rows_pending:
            found.append(f"gpu: device {gpu.index} needs a reset: memory retirement or row remapping is pending")
        if gpu.rows_failed:
            found.append(f"gpu: device {gpu.index} has a row remapping failure")
    numbers = [xid for xid in xids(kernel_log) if xid not in _OF_THE_PROGRAM]
    if numbers:
        found.append(
            f"gpu: Xid {', '.join(map(str, dict.fromkeys(numbers)))} in the kernel's log since the node booted"
        )
    return found


_NETWORK_FILE_SYSTEMS = frozenset({"lustre", "nfs", "nfs4", "gpfs", "beegfs", "ceph", "fuse.weka", "wekafs"})
_LUSTRE_HEALTHY = "healthy"
_LONGEST_REASON = 200


def network_mounts(mountinfo: Iterable[str]) -> list[str]:
    """Return where network file systems are mounted, from the lines of ``/proc/self/mountinfo``."""
    found = []
    for line in mountinfo:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split(maxsplit=1)
        if len(fields) > 4 and kind and kind[0] in _NETWORK_FILE_SYSTEMS:
            found.append(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4]))
    return list(dict.fromkeys(found))


def lustre_problems(health: str) -> list[str]:
    """Return what Lustre says of itself in ``/sys/fs/lustre/health_check``; empty where there is no such file."""
    return [] if health in ("", _LUSTRE_HEALTHY) else [f"mounts: Lustre says that it is {health.splitlines()[0]!r}"]


def segment_file(environ: Mapping[str, str]) -> str:
    """Return the name of the file that keeps this array task of Slurm, or this job, out of rounds; empty elsewhere.

    nvidia-resiliency-ext 0.7 reads the same name.
    """
    job = environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID") or ""
    return job and f"segment_health_check.{job}.{environ.get('SLURM_ARRAY_TASK_ID') or job}"


def segment_problems(path: str, text: str) -> list[str]:
    """Return why this segment is kept out, given the beginning of its file; a missing or empty one keeps none out."""
    if not text:
        return []
    reason = next(iter(text.strip().splitlines()), "").strip()[:_LONGEST_REASON]
    return [f"segment: marked as unhealthy by {path}{f': {reason}' if reason else ''}"]


def xids(kernel_log: Iterable[str]) -> list[int]:
    """Return the numbers of the driver's errors, oldest first."""
    matches = (re.search(r"NVRM: Xid \([^)]*\): (\d+)", line) for line in kernel_log)
    return [int(match[1]) for match in matches if match]


def directory_problems(check: str, path: str, free_bytes: int) -> list[str]:
    """Return what is wrong with a directory that has answered; ``check``: disk or storage."""
    if free_bytes >= LEAST_FREE_BYTES:
        return []
    return [f"{check}: {free_bytes / 2**20:.0f} MiB free in {path}, {LEAST_FREE_BYTES >> 20} MiB are needed"]


def net_problems(interfaces: Sequence[str], ports: Sequence[Port]) -> list[str]:
    """Return problems of the network; ``interfaces`` are those that are up, without the loopback."""
    found = [] if interfaces else ["net: no network interface is up"]
    for port in ports:
        if port.cable == _CABLE and port.link != _ACTIVE:
            found.append(f"net: port {port.name} is {port.link}, although its cable is connected")
    if ports and not any(port.link == _ACTIVE for port in ports):
        found.append(f"net: none of {counted(len(ports), 'InfiniBand port')} is active")
    return found
