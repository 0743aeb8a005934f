"""``python -m megatron_ft.coordinator``: coordinate one job, until its end. Launchers start it; so may a person."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence

from megatron_ft.coordinator.service import Service
from megatron_ft.core.errors import FaultToleranceError
from megatron_ft.core.job.coordinator import Coordinator
from megatron_ft.ipc import tcp
from megatron_ft.ipc.secret import read_secret

_EXIT_MISTAKE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Serve; the exit code."""
    parser = argparse.ArgumentParser(prog="megatron-ft coordinator", description=__doc__)
    parser.add_argument("--listen", default=":29500", metavar="HOST:PORT", help="default: :29500, on all addresses")
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--owner", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--elsewhere", default="", help=argparse.SUPPRESS)
    parser.add_argument("--takes-over", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    try:
        secret = read_secret(os.environ)
        listener = _listener(options.listen, options.fd)
        owner = None if options.owner is None else os.pidfd_open(options.owner)
    except (OSError, FaultToleranceError) as error:
        print(f"megatron-ft coordinator: {options.listen}: {error}", file=sys.stderr)
        return _EXIT_MISTAKE
    os.environ.pop("FT_SECRET", None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the launchers get it, too, and end the job
    tcp.raise_descriptor_limit()
    word = f"{socket.gethostname()}.{os.getpid()}.{os.urandom(4).hex()}"
    machine = Coordinator(
        word,
        founds=not options.takes_over,
        owned=owner is not None,
        elsewhere=options.elsewhere,
        now_s=time.monotonic(),
    )
    Service(listener, machine, secret=secret, owner=owner).run()
    return 0


def _listener(address: str, fd: int | None) -> socket.socket:
    if fd is None:
        return tcp.listen(*tcp.parse_address(address))
    listener = socket.socket(fileno=fd)
    listener.setblocking(False)
    return listener


if __name__ == "__main__":
    sys.exit(main())
