"""``python -m megatron_ft.memory.keeper``: the keeper of a node's memory checkpoints. Started by ``ft_launcher``."""

from __future__ import annotations

import os
import signal
import socket
import sys

from megatron_ft.link.linux.process_setup import die_with_parent, set_name
from megatron_ft.link.wire import Channel
from megatron_ft.memory.base import digests
from megatron_ft.memory.keeper.service import KeeperService


def main() -> None:
    """Read the command line, ``--name value`` pairs, and serve until the launcher ends."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print("The keeper of memory checkpoints is started by ft_launcher.")
        raise SystemExit(2)
    given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    die_with_parent()
    if os.getppid() != int(given["--parent"]):
        return  # the launcher has ended before
    # terminals and schedulers signal whole groups: the keeper ends with its launcher
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    set_name(b"ft_keeper")
    listener = socket.socket(fileno=int(given["--socket-fd"]))
    listener.setblocking(False)
    launcher = Channel(socket.socket(fileno=int(given["--launcher-fd"])))
    KeeperService(listener, launcher, digests.load(given["--xxhash"])).run()


if __name__ == "__main__":
    main()
