"""``python -m megatron_ft.job``: lead one job, until its end. The launcher that holds the lock starts it.

It reads from standard input which job that is, and the record of its last decision, if an earlier leader has made one.
It writes the records of further decisions to standard output, and to etcd if the lock is there, before any launcher
hears of them.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence

from megatron_ft.errors import FaultToleranceError
from megatron_ft.exit_codes import MISTAKE_CODE
from megatron_ft.job import etcd_leader
from megatron_ft.job.parts import LEADER_PARTS
from megatron_ft.job.rules.coordinator import Coordinator
from megatron_ft.job.rules.decisions import DecisionRecord
from megatron_ft.job.rules.etcd_keys import Ledger
from megatron_ft.job.rules.messages import LeaderStart
from megatron_ft.job.service import Service
from megatron_ft.link.base.codec import decode, encode
from megatron_ft.link.linux.process_setup import raise_file_limit
from megatron_ft.link.log import COORDINATOR, INFO, LEVEL_VARIABLE
from megatron_ft.link.reactor import Reactor
from megatron_ft.link.secret import read_secret


def main(argv: Sequence[str] | None = None) -> int:
    """Lead the job until it has ended; the exit code: 0, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m megatron_ft.job")
    parser.add_argument("--listener", type=int, required=True, help="a descriptor")
    parser.add_argument("--owner", type=int, required=True, help="process id of the launcher")
    options = parser.parse_args(argv)
    level = os.environ.get(LEVEL_VARIABLE, "")
    if level.isdecimal():
        COORDINATOR.set_level(int(level))
    try:
        secret = read_secret(os.environ)
        owner = os.pidfd_open(options.owner)
        listener = socket.socket(fileno=options.listener)
        listener.setblocking(False)
        if options.owner != os.getppid():
            return 0  # the launcher has ended at once
        start = decode(LeaderStart, sys.stdin.buffer.read())
        ledger = None
        if start.etcd is not None and start.held is not None:
            from megatron_ft.job.etcd_client import EtcdClient  # TLS takes a while to import

            call, new_name = EtcdClient(start.etcd), lambda: os.urandom(16).hex()
            ledger = Ledger(call, start.defined.job, start.held, new_name=new_name)
            if not etcd_leader.enter(ledger, is_needed=lambda: options.owner == os.getppid()):
                return 0
    except ProcessLookupError:
        return 0
    except (OSError, FaultToleranceError, ValueError) as error:
        _say(f"the coordinator can't start: {error}")
        return MISTAKE_CODE
    os.environ.pop("FT_SECRET", None)
    # terminals and schedulers signal whole groups: its end is that of the job, or of its launcher
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    prepare_process()
    records = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what is printed is no record

    def keep(record: DecisionRecord) -> None:
        """Give the launcher the record of a decision: it has that once the kernel does, even if this process dies."""
        data = encode(record) + b"\n"
        try:
            while data:
                data = data[os.write(records, data) :]
        except BrokenPipeError:  # the launcher has ended, and with it the lock
            sys.exit(0)

    machine = Coordinator(
        f"{socket.gethostname()}.{os.getpid()}.{os.urandom(4).hex()}",
        start.defined,
        record=start.record if start.held is None else None,
        epoch=0 if start.held is None else start.held.epoch,
        former=None if ledger is None else ledger.former,
        now_s=time.monotonic(),
        parts=LEADER_PARTS,
    )
    reactor = Reactor()
    service = Service(reactor, machine, listener=listener, secret=secret, keep=keep, say=_say, ledger=ledger)
    reactor.watch(owner, service.close)  # the launcher that holds the lock has ended
    reactor.run_until(lambda: service.is_over)
    return 0


def prepare_process() -> None:
    """Make room for thousands of launchers: open files, and memory that isn't searched for garbage all the time.

    What messages leave behind is free at once; a search for cycles takes the longer the more launchers there are.
    """
    raise_file_limit()
    gc.set_threshold(100_000)


def _say(text: str) -> None:
    COORDINATOR.say(INFO, text)


if __name__ == "__main__":
    sys.exit(main())
