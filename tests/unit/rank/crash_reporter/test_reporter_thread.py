"""The thread that answers the monitor is none of the user's: the page of evidence leaves it out."""

from __future__ import annotations

import faulthandler
import socket
import threading
from pathlib import Path

from megatron_ft.core.diagnosis.evidence import Stacks, Thread
from megatron_ft.core.diagnosis.evidence_page import evidence_text
from megatron_ft.core.diagnosis.stacks import REPORTER_THREAD, parse_faulthandler
from megatron_ft.rank.crash_reporter.reporter import megatron_ft_crash_reporter
from tests.support.evidence import hang_evidence


def test_it_is_known_by_its_function_and_left_out(tmp_path: Path) -> None:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    thread = threading.Thread(target=megatron_ft_crash_reporter, args=(its,), name=REPORTER_THREAD)
    thread.start()
    with ours:
        ours.send(b'{"id": 1}')
        ours.recv(1 << 20)  # it is there
        with (tmp_path / "stacks").open("w") as file:
            faulthandler.dump_traceback(file=file)
    thread.join(10)
    stacks = parse_faulthandler((tmp_path / "stacks").read_text())
    assert any(REPORTER_THREAD in [frame.function for frame in stack.frames] for stack in stacks)
    threads = tuple(Thread(ident=stack.ident, name="", main=False, frames=tuple(stack.frames)) for stack in stacks)
    page = evidence_text(hang_evidence(stacks=Stacks(source="faulthandler", threads=threads)))
    assert "in test_it_is_known_by_its_function_and_left_out" in page
    assert REPORTER_THREAD not in page
