"""Runner of the ready checks, each in its own process, so that a stuck one delays no other."""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ft.core.errors import Refused
from megatron_ft.core.exit_codes import MISTAKE_CODE
from megatron_ft.core.node_health import CHECKS, disk_problems, gpu_problems, net_problems, parse_checks
from megatron_ft.ipc.linux import node_facts, nvml

_UNFIT = 1
_BOUND_S = 20.0
DESCRIPTION = """\
Whether this node is ready for ranks: GPUs that are visible and need no reset, no Xid in the kernel's log but 13, 31,
43, 45, 63 and 94 (gpu), directories that respond and have 1 GiB free (disk), network links that are up (net),
nvidia-smi that exits with 0. Exit code: 0; 1 if it isn't, after one line that says why."""

Problems = Callable[[], list[str]]


@dataclass
class _Running:
    """One check. A process stuck in the kernel is left behind."""

    name: str
    pid: int
    fd: int
    text: bytes = b""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checks",
        metavar="CHECKS",
        help=f"some of {','.join(CHECKS)}; disk checks each --directory, disk:/PATH that path",
    )
    parser.add_argument("--directory", action="append", default=[], metavar="DIR", help="a directory that disk checks")
    parser.add_argument(
        "--ranks",
        type=int,
        default=0,
        metavar="N",
        help="number of GPUs that the gpu check requires (default %(default)s)",
    )
    parser.add_argument(
        "--bound",
        type=float,
        default=_BOUND_S,
        metavar="S",
        help="longest time for each check, in seconds (default %(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the checks and return the exit code."""
    try:
        checks = parse_checks(args.checks)
    except Refused as refused:
        print(f"{args.checks!r}: must be names of checks ({', '.join(CHECKS)}){refused}", file=sys.stderr)
        return MISTAKE_CODE
    problems = check(_planned(checks, args.directory, args.ranks), args.bound)
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


def _planned(checks: Sequence[str], directories: Sequence[str], ranks: int) -> list[tuple[str, Problems]]:
    planned: list[tuple[str, Problems]] = []
    for name in checks:
        if name == "gpu":
            planned.append((name, lambda: _gpu(ranks)))
        elif name == "net":
            planned.append((name, lambda: net_problems(node_facts.interfaces_up(), node_facts.ports())))
        elif name == "nvidia-smi":
            planned.append((name, _nvidia_smi))
        else:
            path = name.partition(":")[2]
            planned += [(f"disk: {each}", _disk(each)) for each in ([path] if path else directories)]
    return planned


def _gpu(ranks: int) -> list[str]:
    library = nvml.load()
    gpus = None if library is None else nvml.gpus(library)
    return gpu_problems(gpus, node_facts.kernel_log(), ranks=ranks)


def _disk(path: str) -> Problems:
    def problems() -> list[str]:
        try:
            return disk_problems(path, node_facts.try_directory(path))
        except OSError as error:
            return [f"disk: {path}: {error.strerror}"]

    return problems


def _nvidia_smi() -> list[str]:
    try:
        done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False)
    except OSError as error:
        return [f"nvidia-smi: {error.strerror}"]
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


def add_command(commands: Any) -> None:
    add_arguments(
        commands.add_parser("node-health", help="whether this node is ready for ranks", description=DESCRIPTION)
    )


def main() -> int:
    """Run as the launcher starts it."""
    parser = argparse.ArgumentParser(prog="megatron-ft node-health", description=DESCRIPTION)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
