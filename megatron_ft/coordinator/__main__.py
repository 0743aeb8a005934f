"""``python -m megatron_ft.coordinator``: coordinate one job, until its end. Launchers start it; so may a person."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence

from megatron_ft.coordinator.service import Service, prepare_process
from megatron_ft.core.codec import decode
from megatron_ft.core.config.torchrun import DEFAULT_PORT
from megatron_ft.core.coordinator.admission import FORGETS_S
from megatron_ft.core.coordinator.coordinator import Coordinator
from megatron_ft.core.errors import FaultToleranceError
from megatron_ft.core.exit_codes import MISTAKE_CODE
from megatron_ft.core.job.messages import JobDefinition
from megatron_ft.ipc.log import COORDINATOR, INFO, LEVEL_VARIABLE
from megatron_ft.ipc.net import tcp
from megatron_ft.ipc.net.secret import read_secret

_EXIT_INTERRUPTED = 130
DESCRIPTION = """\
Coordinate one job until it ends: the launchers of all its nodes connect here, are told who trains in which place, and
report failures. Launchers start a coordinator themselves; start one by hand to have it on a machine that isn't part of
the job. It needs little memory and no GPU. If it dies, ranks train on, and one of the launchers starts another.
Set FT_SECRET (or FT_SECRET_FILE) to the value that the launchers have, and only those that know it are let in."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megatron_ft.coordinator", description=DESCRIPTION)
    add_arguments(parser)
    return coordinate(parser.parse_args(argv))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options for a person, and hidden ones that only a launcher gives."""
    parser.add_argument(
        "--listen",
        default=f":{DEFAULT_PORT}",
        metavar="HOST:PORT",
        help="where launchers connect: an address of this machine, or only :PORT for all of them "
        f"(default: :{DEFAULT_PORT})",
    )
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--owner", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--job", type=_definition, help=argparse.SUPPRESS)
    parser.add_argument("--elsewhere", default="", help=argparse.SUPPRESS)
    parser.add_argument("--takes-over", action="store_true", help=argparse.SUPPRESS)


def coordinate(options: argparse.Namespace) -> int:
    """Serve, until the job has ended; the exit code: 0, 2 for a user's mistake, 130 for Ctrl-C."""
    level = os.environ.get(LEVEL_VARIABLE, "")
    if level.isdecimal():
        COORDINATOR.set_level(int(level))
    try:
        secret = read_secret(os.environ)
        listener = _listener(options.listen, options.fd)
        owner = None if options.owner is None else os.pidfd_open(options.owner)
        if options.owner not in (None, os.getppid()):
            return 0  # the launcher has ended at once, and no launcher has connected yet
    except ProcessLookupError:
        return 0
    except (OSError, FaultToleranceError) as error:
        _say(f"{options.listen}: {error}")
        return MISTAKE_CODE
    os.environ.pop("FT_SECRET", None)
    if owner is not None:  # terminals and schedulers signal whole groups: its end is that of the job
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
    if options.fd is None:
        known = "that know FT_SECRET" if secret else "of any user (FT_SECRET isn't set)"
        host, port = listener.getsockname()[:2]
        where = "all addresses" if host in ("::", "0.0.0.0") else host
        _say(f"listening on {where} port {port} for launchers {known}")
    prepare_process()
    try:
        while _serve(listener, options, secret, owner):
            _say(
                f"no launcher that can continue the job was connected for {FORGETS_S:g} s: the job is forgotten; "
                "waiting for launchers of another job, or of this one started again"
            )
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    return 0


def _serve(listener: socket.socket, options: argparse.Namespace, secret: bytes | None, owner: int | None) -> bool:
    """One job, until its end. True if its launchers have gone without one."""
    name = f"{socket.gethostname()}.{os.getpid()}.{os.urandom(4).hex()}"
    machine = Coordinator(
        name,
        founds=not options.takes_over,
        owned=owner is not None,
        elsewhere=options.elsewhere,
        defined=options.job,
        now_s=time.monotonic(),
    )
    with open(os.devnull, "wb") as nowhere:  # by then there may be no descriptor left

        def let_go_of_output() -> None:
            """Give up the launcher's output, so that its readers see its end."""
            for fd in (1, 2):
                os.dup2(nowhere.fileno(), fd)

        service = Service(listener.dup(), machine, secret=secret, owner=owner, on_orphaned=let_go_of_output, say=_say)
        service.run()
    return service.forgets


def _definition(text: str) -> JobDefinition:
    return decode(JobDefinition, os.fsencode(text))


def _say(text: str) -> None:
    COORDINATOR.say(INFO, text)


def _listener(address: str, fd: int | None) -> socket.socket:
    if fd is None:
        return tcp.listen(*tcp.parse_address(address, default_port=DEFAULT_PORT))
    listener = socket.socket(fileno=fd)
    listener.setblocking(False)
    return listener


if __name__ == "__main__":
    sys.exit(main())
