"""Which addresses of a host are tried, and when its name is looked up again."""

from __future__ import annotations

import socket

from megatron_ft.ipc.net.tcp import Target
from megatron_ft.launcher.coordination.host_addresses import HostAddresses

NAME = "host:1"


def target(number: int) -> Target:
    return socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"10.0.0.{number}", 1)


A, B, C = map(target, (1, 2, 3))


def test_a_late_answer_is_used_once_and_not_for_ever() -> None:
    hosts = HostAddresses()
    assert hosts.known(NAME, 0.0) is None
    hosts.keep(NAME, [A, B], 1.0)
    assert hosts.known("other:1", 2.0) is None
    assert hosts.known(NAME, 2.0) == [A, B]
    assert hosts.known(NAME, 2.0) is None
    hosts.keep(NAME, [A, B], 3.0)
    assert hosts.known(NAME, 64.0) is None


def test_each_address_that_is_silent_gives_way_to_the_next() -> None:
    hosts = HostAddresses()
    for silent, first in ((A, [B, C, A]), (B, [C, A, B]), (C, [A, B, C])):
        hosts.unanswered(NAME, silent, silent=True)
        assert hosts.in_order(NAME, [A, B, C]) == first
        assert hosts.in_order("other:1", [A, B, C]) == [A, B, C]
    hosts.unanswered(NAME, target(9), silent=True)  # the name has other addresses by now
    assert hosts.in_order(NAME, [A, B]) == [A, B]


def test_where_a_coordinator_spoke_is_tried_alone_as_long_as_it_answers() -> None:
    hosts = HostAddresses()
    hosts.unanswered(NAME, A, silent=True)
    hosts.answered(NAME, B)
    assert hosts.known(NAME, 0.0) == [B]
    assert hosts.known(NAME, 1e6) == [B]
    hosts.unanswered(NAME, B, silent=False)
    assert hosts.known(NAME, 1e6) is None
    assert hosts.in_order(NAME, [A, B]) == [A, B]
