"""Which addresses of a host are tried, and when its name is looked up again."""

from __future__ import annotations

import socket

from megatron_ft.ipc.net.tcp import Target
from megatron_ft.launcher.coordination.host_addresses import HostAddresses

NAME = "host:1"


def target(number: int) -> Target:
    return socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"10.0.0.{number}", 1)


A, B, C = map(target, (1, 2, 3))


def test_remembered_addresses_are_used_once_and_expire() -> None:
    hosts = HostAddresses()
    assert hosts.take(NAME, 0.0) == []
    hosts.remember(NAME, [A, B], 1.0)
    assert hosts.take("other:1", 2.0) == []
    assert hosts.take(NAME, 61.0) == [A, B]
    assert hosts.take(NAME, 61.0) == []
    hosts.remember(NAME, [A, B], 3.0)
    assert hosts.take(NAME, 64.0) == []


def test_silent_address_gives_way_to_the_next() -> None:
    hosts = HostAddresses()
    for silent, first in ((A, [B, C, A]), (B, [C, A, B]), (C, [A, B, C])):
        hosts.silent(NAME, silent)
        hosts.remember(NAME, [A, B, C], 0.0)
        assert hosts.take(NAME, 0.0) == hosts.in_order(NAME, [A, B, C]) == first
        assert hosts.in_order("other:1", [A, B, C]) == [A, B, C]
    hosts.silent(NAME, target(9))  # the name has other addresses by now
    assert hosts.in_order(NAME, [A, B]) == [A, B]
