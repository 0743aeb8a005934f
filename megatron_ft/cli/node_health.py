"""`megatron-ft node-health`: checks of this node, for ``--ft-node-health-command``, a prolog, or by hand.

Each check runs in a process of its own, so that one that doesn't answer delays no other. A node is refused only for
what is certain. A fact that can't be determined is no problem, unless the user asked for it.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ft.errors import ConfigError, nearest
from megatron_ft.link.base.hosts import segment_file
from megatron_ft.link.base.rank_variables import DIRECTORIES_VARIABLE
from megatron_ft.link.base.wording import counted
from megatron_ft.link.linux import kernel_facts, nvml

CHECKS = ("gpu", "disk", "net", "storage", "mounts", "segment")
LEAST_FREE_BYTES = 1 << 30
"""Free bytes required in each checked directory."""
_UNFIT = 1
_BOUND_S = 20.0
_OF_THE_PROGRAM = frozenset({"13", "31", "43", "45", "63", "94"})
"""Xids caused by a program's error, or repaired: they say nothing about the device."""
_NETWORK_FILE_SYSTEMS = frozenset({"lustre", "nfs", "nfs4", "gpfs", "beegfs", "ceph", "fuse.weka", "wekafs"})
_SYS, _MOUNTS = Path("/sys"), Path("/proc/self/mountinfo")
_LONGEST_REASON = 200
_DESCRIPTION = """\
Check that this node is ready for ranks: GPUs that are visible and need no reset, no Xid in the kernel's log but 13, 31,
43, 45, 63 and 94 (gpu), the temporary directory (disk) and those of the job (storage) respond and have 1 GiB free,
network links that are up (net), mounted network file systems that answer (mounts), no mark of this Slurm job or array
task in --segment-health-check-dir (segment). Exit code: 0; 1 if it isn't, after one line
that says why. ft_launcher --ft-node-health-command 'megatron-ft node-health gpu,disk,net,storage' runs it before each
cycle."""

Problems = Callable[[], list[str]]


def add_command(commands: Any) -> None:
    """Add the command to the subparsers of `megatron-ft`."""
    parser = commands.add_parser(
        "node-health", help="check that this node is ready for ranks", description=_DESCRIPTION
    )
    parser.add_argument(
        "checks",
        metavar="CHECKS",
        help=f"some of {','.join(CHECKS)}; disk:/PATH and storage:/PATH check one more directory",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="number of GPUs that the gpu check requires (default: LOCAL_WORLD_SIZE, which ft_launcher sets, else 0)",
    )
    parser.add_argument(
        "--bound",
        type=float,
        default=_BOUND_S,
        metavar="S",
        help="longest time for each check, in seconds (default %(default)s)",
    )
    parser.add_argument(
        "--segment-health-check-dir",
        metavar="DIR",
        help="directory where a file segment_health_check.JOB.TASK that isn't empty marks a Slurm array task",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    checks = parse_checks(args.checks)
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = args.ranks if args.ranks is not None else int(given) if given.isdecimal() else 0
    if "segment" in checks and not args.segment_health_check_dir:
        raise ConfigError("the check segment needs --segment-health-check-dir DIR")
    planned = [each for name in checks for each in _planned(name, ranks, args.segment_health_check_dir or "")]
    problems = check(planned, args.bound)
    if problems:
        print("; ".join(problems))
    return _UNFIT if problems else 0


def check(planned: Sequence[tuple[str, Problems]], bound_s: float) -> list[str]:
    """Return the problems of all checks, run at the same time, each within the bound (seconds)."""
    running = [(name, *_start(name, problems)) for name, problems in planned]
    deadline_s = time.monotonic() + bound_s
    found: list[str] = []
    for name, pid, read in running:
        text = b""
        while select.select([read], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            data = os.read(read, 4096)
            if not data:
                os.waitpid(pid, 0)
                found += [text.decode(errors="replace")] if text else []
                break
            text += data
        else:  # a process stuck in the kernel is left behind
            found.append(f"{name} doesn't answer within {bound_s:g} s")
            os.kill(pid, signal.SIGKILL)
        os.close(read)
    return found


def _start(name: str, problems: Problems) -> tuple[int, int]:
    """Run a check in a process of its own. Return its PID, and a descriptor that yields its problems."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = "; ".join(problems())
        except OSError as error:
            text = f"{name}: {error.strerror}"
        except BaseException as error:  # noqa: BLE001 - whatever it is: the node isn't known to be ready
            text = f"{name}: {error!r}"
        os.write(write, text.encode()[:4096])
        os._exit(0)
    os.close(write)
    return pid, read


def _planned(name: str, ranks: int, segment_dir: str) -> list[tuple[str, Problems]]:
    """Return what a check looks at, each with the function that does."""
    kind, _, path = name.partition(":")
    match kind:
        case "gpu":
            return [(name, partial(gpu_problems, ranks))]
        case "net":
            return [(name, net_problems)]
        case "mounts":
            mounts = network_mounts(_MOUNTS.read_text(errors="surrogateescape").splitlines())
            return [(name, lustre_problems), *((f"mounts: {each}", partial(_mount, each)) for each in mounts)]
        case "segment":
            file = segment_file(os.environ)
            path = os.path.join(segment_dir, file)
            return [(f"segment: {path}", partial(segment_problems, path))] if file else []
    directories = {
        "disk": [tempfile.gettempdir()],
        "storage": list(filter(None, os.environ.get(DIRECTORIES_VARIABLE, "").split(os.pathsep))),
    }
    return [
        (f"{kind}: {each}", partial(directory_problems, kind, each)) for each in ([path] if path else directories[kind])
    ]


def parse_checks(text: str) -> tuple[str, ...]:
    """Return the names of checks; ``disk:PATH`` and ``storage:PATH`` check one more directory.

    Raises:
        ConfigError: a check is unknown.
    """
    must = f"{text!r}: must be names of checks ({', '.join(CHECKS)})"
    checks = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for check in checks:
        name, colon, path = check.partition(":")
        if name not in CHECKS:
            raise ConfigError(f"{must}{nearest(name, CHECKS)}")
        if colon and (name not in ("disk", "storage") or not path.startswith("/")):
            raise ConfigError(f"{must}; {check!r}: only disk and storage have a path, as in storage:/checkpoints")
    return checks


def gpu_problems(ranks: int) -> list[str]:
    """Return problems of the devices, of which each of the node's ``ranks`` needs one."""
    library = nvml.load()
    devices = None if library is None else nvml.memory_problems(library)
    if devices is None:
        return ["gpu: there is no NVIDIA driver (libnvidia-ml.so.1)"]
    found = [f"gpu: {counted(len(devices), 'device')} for {counted(ranks, 'rank')}"] if len(devices) < ranks else []
    found += [f"gpu: device {index} {problem}" for index, problems in enumerate(devices) for problem in problems]
    matches = (re.search(r"NVRM: Xid \([^)]*\): (\d+)", line) for line in kernel_facts.kernel_log())
    if xids := dict.fromkeys(match[1] for match in matches if match and match[1] not in _OF_THE_PROGRAM):
        found.append(f"gpu: Xid {', '.join(xids)} in the kernel's log since the node booted")
    return found


def directory_problems(check: str, path: str) -> list[str]:
    """Write a file in the directory and remove it. Return what is wrong; ``check``: disk or storage."""
    with tempfile.NamedTemporaryFile(dir=path, prefix=".ft-node-health-") as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
    found = os.statvfs(path)
    if (free_bytes := found.f_bavail * found.f_frsize) >= LEAST_FREE_BYTES:
        return []
    return [f"{check}: {free_bytes / 2**20:.0f} MiB free in {path}, {LEAST_FREE_BYTES >> 20} MiB are needed"]


def net_problems() -> list[str]:
    """Return problems of network interfaces, and of ports of InfiniBand devices (and RoCE)."""
    states = {path.parent.name: _word(path) for path in _SYS.glob("class/net/*/operstate")}
    # "unknown" counts as up: not all drivers report a state
    is_up = any(name != "lo" and state in ("up", "unknown") for name, state in states.items())
    found = [] if is_up else ["net: no network interface is up"]
    links = []
    for path in sorted(_SYS.glob("class/infiniband/*/ports/*")):
        links.append(link := _word(path / "state").partition(": ")[2])
        if link != "ACTIVE" and _word(path / "phys_state").partition(": ")[2] == "LinkUp":
            name = f"{path.parent.parent.name}/{path.name}"
            found.append(f"net: port {name} is {link}, although its cable is connected")
    if links and "ACTIVE" not in links:
        found.append(f"net: none of {counted(len(links), 'InfiniBand port')} is active")
    return found


def network_mounts(mountinfo: Iterable[str]) -> list[str]:
    """Return where network file systems are mounted, from the lines of ``/proc/self/mountinfo``."""
    found = []
    for line in mountinfo:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split(maxsplit=1)
        if len(fields) > 4 and kind and kind[0] in _NETWORK_FILE_SYSTEMS:
            found.append(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4]))
    return list(dict.fromkeys(found))


def lustre_problems() -> list[str]:
    health = _word(_SYS / "fs" / "lustre" / "health_check")
    return [] if health in ("", "healthy") else [f"mounts: Lustre says that it is {health.splitlines()[0]!r}"]


def _mount(path: str) -> list[str]:
    """Ask the file system for the first entry of a directory."""
    with os.scandir(path) as entries:
        next(entries, None)
    return []


def segment_problems(path: str) -> list[str]:
    """Return why this segment is kept out by its file; a missing or empty one keeps none out."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return []  # a pipe would wait for a writer
        with open(path, errors="replace") as file:
            text = file.read(4096)
    except FileNotFoundError:
        return []
    reason = next(iter(text.strip().splitlines()), "").strip()[:_LONGEST_REASON]
    return [f"segment: marked as unhealthy by {path}{f': {reason}' if reason else ''}"] if text else []


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
