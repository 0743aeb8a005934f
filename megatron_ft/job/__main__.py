"""``python -m megatron_ft.job``: lead one job, until its end. The launcher that holds the lock starts it.

It reads from standard input which job that is, and the record of its last decision, if an earlier leader has made one.
It writes the records of further decisions to standard output, and to etcd if the lock is there, before any launcher
hears of them.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import socket
import sys
import time

from megatron_ft.errors import ConfigError
from megatron_ft.exit_codes import MISTAKE_CODE
from megatron_ft.job.etcd_leader import enter
from megatron_ft.job.parts import LEADER_PARTS
from megatron_ft.job.rules.coordinator import Coordinator
from megatron_ft.job.rules.decisions import DecisionRecord
from megatron_ft.job.rules.etcd_keys import Ledger
from megatron_ft.job.rules.messages import LeaderStart
from megatron_ft.job.service import Service
from megatron_ft.link.base.codec import decode, encode
from megatron_ft.link.linux.process_setup import die_with_parent, raise_file_limit
from megatron_ft.link.log import COORDINATOR, INFO, LEVEL_VARIABLE
from megatron_ft.link.reactor import Reactor


def main() -> int:
    """Lead the job until it has ended."""
    if len(sys.argv) != 3:
        print("The coordinator is started by ft_launcher.")
        return MISTAKE_CODE
    die_with_parent()  # and with it the lock: the next launcher finds no port that an old leader still has
    if os.getppid() != int(sys.argv[1]):
        return 0  # the launcher has ended at once
    # terminals and schedulers signal whole groups: its end is that of the job, or of its launcher
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    level = os.environ.get(LEVEL_VARIABLE, "")
    if level.isdecimal():
        COORDINATOR.set_level(int(level))
    listener = socket.socket(fileno=int(sys.argv[2]))
    listener.setblocking(False)
    records = open(os.dup(sys.stdout.fileno()), "wb")  # noqa: SIM115 - as long as the process
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what is printed is no record

    def keep(record: DecisionRecord) -> None:
        """Give the launcher the record of a decision: it has that once the kernel does, even if this process dies."""
        records.write(encode(record) + b"\n")
        records.flush()

    start = decode(LeaderStart, sys.stdin.buffer.read())
    record, ledger = start.record, None
    if start.etcd is not None:
        from megatron_ft.job.etcd_client import EtcdClient  # TLS takes a while to import

        try:
            ledger = Ledger(EtcdClient(start.etcd), start.defined.job, start.epoch, start.lease)
        except ConfigError as error:  # certificates that were good when the launcher looked
            sys.exit(f"the coordinator can't start: {error}")
        record = enter(ledger)
    prepare_process()
    machine = Coordinator(
        f"{socket.gethostname()}.{os.getpid()}.{os.urandom(4).hex()}",
        start.defined,
        record=record,
        epoch=start.epoch,
        now_s=time.monotonic(),
        parts=LEADER_PARTS,
    )
    reactor, say = Reactor(), functools.partial(COORDINATOR.say, INFO)
    service = Service(reactor, machine, listener=listener, secret=start.secret, keep=keep, say=say, ledger=ledger)
    reactor.run_until(lambda: service.is_over)
    return 0


def prepare_process() -> None:
    """Make room for thousands of launchers: open files, and memory that isn't searched for garbage all the time.

    What messages leave behind is free at once; a search for cycles takes the longer the more launchers there are.
    """
    raise_file_limit()
    gc.set_threshold(1_000_000)


if __name__ == "__main__":
    sys.exit(main())
