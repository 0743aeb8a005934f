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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron_ft.errors import ConfigError, Refused
from megatron_ft.link.base.node_problems import (
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
from megatron_ft.link.linux import node_facts, nvml

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
            return [(name, lambda: _gpu(ranks))]
        case "net":
            return [(name, lambda: net_problems(node_facts.interfaces_up(), node_facts.ports()))]
        case "nvidia-smi":
            return [(name, _nvidia_smi)]
        case "mounts":
            mounts = network_mounts(node_facts.mountinfo())
            looks = [(f"mounts: {each}", partial(_mount, each)) for each in mounts]
            return [(name, lambda: lustre_problems(node_facts.lustre_health())), *looks]
        case "segment":
            file = segment_file(os.environ)
            path = os.path.join(segment_dir, file)
            return [(f"segment: {path}", partial(_segment, path))] if file else []
    directories = {
        "disk": [tempfile.gettempdir()],
        "storage": list(filter(None, os.environ.get(DIRECTORIES_VARIABLE, "").split(os.pathsep))),
    }
    return [(f"{kind}: {each}", partial(_directory, kind, each)) for each in ([path] if path else directories[kind])]


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
