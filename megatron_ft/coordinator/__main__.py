"""``python -m megatron_ft.coordinator``: coordinate one job, until its end. Launchers start it."""

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
from megatron_ft.core.coordinator.coordinator import Coordinator
from megatron_ft.core.errors import FaultToleranceError
from megatron_ft.core.exit_codes import MISTAKE_CODE
from megatron_ft.core.job.messages import JobDefinition
from megatron_ft.core.state_table import report_unlisted
from megatron_ft.ipc.log import COORDINATOR, INFO, LEVEL_VARIABLE
from megatron_ft.ipc.net.secret import read_secret


def main(argv: Sequence[str] | None = None) -> int:
    """Serve, until the job has ended; the exit code: 0, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m megatron_ft.coordinator")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="address of the socket, for lines")
    parser.add_argument("--fd", type=int, required=True, help="the listening socket")
    parser.add_argument("--owner", type=int, help="process id of the launcher")
    parser.add_argument("--job", type=_definition, help="the launcher's job")
    parser.add_argument("--elsewhere", default="", help="where the launcher is led")
    parser.add_argument("--takes-over", action="store_true", help="begin no job")
    options = parser.parse_args(argv)
    level = os.environ.get(LEVEL_VARIABLE, "")
    if level.isdecimal():
        COORDINATOR.set_level(int(level))
    report_unlisted(COORDINATOR.debug)
    try:
        secret = read_secret(os.environ)
        listener = socket.socket(fileno=options.fd)
        listener.setblocking(False)
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
    prepare_process()
    _serve(listener, options, secret, owner)
    return 0


def _serve(listener: socket.socket, options: argparse.Namespace, secret: bytes | None, owner: int | None) -> None:
    """Serve one job, until its end."""
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

        service = Service(listener, machine, secret=secret, owner=owner, on_orphaned=let_go_of_output, say=_say)
        service.run()


def _definition(text: str) -> JobDefinition:
    return decode(JobDefinition, os.fsencode(text))


def _say(text: str) -> None:
    COORDINATOR.say(INFO, text)


if __name__ == "__main__":
    sys.exit(main())
