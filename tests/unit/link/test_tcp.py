"""TCP connections: what the kernel does for them."""

from __future__ import annotations

import socket

import pytest

from megatron_ft.link import tcp


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_both_ends_of_a_connection_send_at_once_and_notice_a_host_that_is_off_within_5_seconds(host: str) -> None:
    with tcp.listen(host, 0) as listener:
        there = tcp.connect("127.0.0.1", listener.getsockname()[1])
        listener.settimeout(20.0)
        accepted, _ = listener.accept()
        with there, accepted:
            for sock in (there, accepted):
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000
                keeps = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                assert [sock.getsockopt(socket.IPPROTO_TCP, option) for option in keeps] == [2, 1, 3]
