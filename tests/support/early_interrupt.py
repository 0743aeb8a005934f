"""A rank gets SIGINT before it has been told to go; says how it ended. An argument: its script."""

from __future__ import annotations

import os
import select
import signal
import sys

from megatron_ft.link.linux.process_setup import become_subreaper
from megatron_ft.link.messages.fork_server_messages import Forked, Orders
from megatron_ft.run_ahead.forking_spawner import ServerProcess
from tests import ROOT


def main() -> None:
    """Fork one rank."""
    become_subreaper()
    command = [sys.executable, "-u", sys.argv[1]]
    server = ServerProcess(Orders(command, {**os.environ, "PYTHONPATH": str(ROOT)}))
    while not server.is_ready:
        select.select([server.channel_fd], [], [])
        server.read()
    go_read, go_write = os.pipe()
    answer = server.fork_ranks([({"RANK": "0"}, [go_read, 1, 2])])
    assert isinstance(answer, Forked)
    (pid,) = answer.pids
    os.kill(pid, signal.SIGINT)
    os.write(go_write, b"g")
    status = os.waitpid(pid, 0)[1]
    print("ended with", os.waitstatus_to_exitcode(status), flush=True)
    server.kill()


main()
