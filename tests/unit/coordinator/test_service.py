"""What the coordinator sends, and what it hears of the launcher that has started it."""

from __future__ import annotations

import os
import time

from megatron_ft.coordinator.service import Service, frame
from megatron_ft.core.job import messages as m
from megatron_ft.core.job.coordinator import Coordinator
from megatron_ft.core.job.decisions import Decision, Kind
from megatron_ft.ipc.net import tcp
from megatron_ft.ipc.wire import encode


def test_a_proposal_whose_place_alone_is_written_anew_is_what_any_message_is() -> None:
    about = Decision(3, (2, "c", 1), Kind.END, 1, 4, 4, 0, text='says "place":7, and \\"place\\":8')
    for place in (0, 5, 9999, None):
        proposal = m.Propose((2, "c", 7), about, place, place is not None, ('host"place":1:29500', "b:1"))
        assert frame(proposal) == encode(proposal)
    assert frame(m.Beat()) == encode(m.Beat())


def test_what_a_launcher_has_said_in_the_pipe_is_read_when_it_has_ended() -> None:
    told: list[int | str] = []
    machine = Coordinator("c", founds=False, now_s=time.monotonic())
    machine.owner_follows_another = told.append  # type: ignore[method-assign, assignment]
    machine.orphaned = lambda: told.append("orphaned")  # type: ignore[method-assign]
    words, writes = os.pipe2(os.O_NONBLOCK)
    owner, lives = os.pipe()  # readable once the other end is closed, as a pidfd is at the end of its process
    service = Service(tcp.listen("127.0.0.1", 0), machine, secret=None, owner=owner, owner_pipe=words)
    try:
        os.write(writes, b"3\n17\n")
        os.close(lives)
        while "orphaned" not in told:
            service.run_once()
        assert told == [17, "orphaned"]
    finally:
        service._close()
        for fd in (words, writes):
            os.close(fd)
