"""`megatron-ft node-health`: checks of this node, for ``--ft-node-health-command``, a prolog, or by hand.

Each check runs in a process of its own, so that one that doesn't answer delays no other.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_ft.core.errors import ConfigError, Refused
from megatron_ft.core.node_problems import (
    CHECKS,
    DIRECTORIES_VARIABLE,
    directory_problems,
    gpu_problems,
    lustre_problems,
    net_problems,
    network_mounts,
    parse_checks,
    segment_file,
    segment_problems,
)
from megatron_ft.ipc.linux import node_facts, nvml

_UNFIT = 1
_BOUND_S = 20.0
_DESCRIPTION = """\
Check that this node is ready for ranks: GPUs that are visible and need no reset, no Xid in the kernel's log but 13, 31,
43, 45, 63 and 94 (gpu), the temporary directory (disk) and those of the job (storage) respond and have 1 GiB free,
network links that are up (net), mounted network file systems that answer (mounts), no mark of this Slurm job or array
task in --segment-health-check-dir (segment), nvidia-smi that exits with 0. Exit code: 0; 1 if it isn't, after one line
that says why. ft_launcher --ft-node-health-command 'megatron-ft node-health gpu,disk,net,storage' runs it before each
cycle."""

Problems = Callable[[], list[str]]


@dataclass
class _Running:
    """One check. A process stuck in the kernel is left behind."""

    name: str
    pid: int
    fd: int
    text: bytes = b""


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
    try:
        checks = parse_checks(args.checks)
    except Refused as refused:
        raise ConfigError(f"{args.checks!r}: must be names of checks ({', '.join(CHECKS)}){refused}") from None
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = args.ranks if args.ranks is not None else int(given) if given.isdecimal() else 0
    directories = {
        "disk": [tempfile.gettempdir()],
        "storage": list(filter(None, os.environ.get(DIRECTORIES_VARIABLE, "").split(os.pathsep))),
    }
    if "segment" in checks and not args.segment_health_check_dir:
        raise ConfigError("the check segment needs --segment-health-check-dir DIR")
    problems = check(_planned(checks, directories, ranks, args.segment_health_check_dir), args.bound)
    if problems:
        print("; ".join(problems))
    return _UNFIT if problems else 0


def check(planned: Sequence[tuple[str, Problems]], bound_s: float) -> list[str]:
    """Return the problems of all checks, run at the same time, each within the bound (seconds)."""
    running = [_start(name, problems) for name, problems in planned]
    deadline_s = time.monotonic() + bound_s
    found: list[str] = []
    for each in running:
        if not _read(each, deadline_s):
            found.append(f"{each.name} doesn't answer within {bound_s:g} s")
            os.kill(each.pid, signal.SIGKILL)
        elif each.text:
            found.append(each.text.decode(errors="replace"))
        os.close(each.fd)
    return found


def _planned(
    checks: Sequence[str], directories: Mapping[str, list[str]], ranks: int, segment_dir: str | None
) -> list[tuple[str, Problems]]:
    planned: list[tuple[str, Problems]] = []
    for name in checks:
        if name == "gpu":
            planned.append((name, lambda: _gpu(ranks)))
        elif name == "net":
            planned.append((name, lambda: net_problems(node_facts.interfaces_up(), node_facts.ports())))
        elif name == "nvidia-smi":
            planned.append((name, _told(name, _nvidia_smi)))
        elif name == "mounts":
            planned.append((name, lambda: lustre_problems(node_facts.lustre_health())))
            mounts = network_mounts(node_facts.mountinfo())
            for what, each in ((f"mounts: {each}", each) for each in mounts):
                planned.append((what, _told(what, partial(_mount, each))))
        elif name == "segment":
            file = segment_file(os.environ)
            path = os.path.join(segment_dir or "", file)
            planned.append((name, _told(f"segment: {path}", partial(_segment, path)) if file else list))
        else:
            kind, _, path = name.partition(":")
            for what, each in ((f"{kind}: {each}", each) for each in ([path] if path else directories[kind])):
                planned.append((what, _told(what, partial(_directory, kind, each))))
    return planned


def _told(what: str, look: Problems) -> Problems:
    """Return the check with a file or a command that can't be used as a problem, too."""

    def problems() -> list[str]:
        try:
            return look()
        except OSError as error:
            return [f"{what}: {error.strerror}"]

    return problems


def _gpu(ranks: int) -> list[str]:
    library = nvml.load()
    gpus = None if library is None else nvml.gpus(library)
    return gpu_problems(gpus, node_facts.kernel_log(), ranks=ranks)


def _directory(kind: str, path: str) -> list[str]:
    return directory_problems(kind, path, node_facts.try_directory(path))


def _segment(path: str) -> list[str]:
    return segment_problems(path, node_facts.beginning_of(path))


def _mount(path: str) -> list[str]:
    node_facts.look_into(path)
    return []


def _nvidia_smi() -> list[str]:
    done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False)
    said = (done.stdout + done.stderr).strip().splitlines()
    return [f"nvidia-smi ended with code {done.returncode}: {said[-1] if said else ''}"] if done.returncode else []


def _start(name: str, problems: Problems) -> _Running:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = "; ".join(problems())
        except BaseException as error:  # noqa: BLE001 - whatever it is: the node isn't known to be ready
            text = f"{name}: {error!r}"
        os.write(write, text.encode()[:4096])
        os._exit(0)
    os.close(write)
    return _Running(name, pid, read)


def _read(running: _Running, deadline_s: float) -> bool:
    """Read the check's output. Return True if it has ended in time."""
    while select.select([running.fd], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
        data = os.read(running.fd, 4096)
        if not data:
            os.waitpid(running.pid, 0)
            return True
        running.text += data
    return False
