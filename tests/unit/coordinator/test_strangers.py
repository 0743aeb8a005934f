"""Connections that don't identify themselves: a flood displaces itself, not launchers on other hosts."""

from __future__ import annotations

from megatron_ft.coordinator.strangers import GRACE_S, MOST, MOST_BYTES, Strangers, source_of


def flood(strangers: Strangers, source: str, count: int, now_s: float = 0.0, first: int = 1000) -> None:
    for number in range(first, first + count):
        strangers.add(number, source, now_s)


def test_a_launcher_among_a_flood_from_another_address_is_never_displaced() -> None:
    strangers = Strangers()
    strangers.add(1, "10.0.0.1", 0.0)
    flood(strangers, "10.0.0.2", MOST - 1)
    assert strangers.are_full(0)
    for turn in range(1, 5 * MOST):
        now_s = GRACE_S + turn / 1000
        displaced = strangers.displaceable(now_s)
        assert displaced is not None
        assert displaced != 1
        assert strangers.displace(displaced, now_s) == "10.0.0.2"
        strangers.add(10_000 + turn, "10.0.0.2", now_s)
    assert 1 in strangers


def test_a_burst_from_one_address_has_its_grace_and_a_flood_has_it_once() -> None:
    strangers = Strangers()
    flood(strangers, "10.0.0.2", MOST)
    assert strangers.displaceable(GRACE_S / 2) is None
    assert strangers.relief_s == GRACE_S
    first = strangers.displaceable(GRACE_S)
    assert first == 1000
    strangers.displace(first, GRACE_S)
    strangers.add(5000, "10.0.0.2", GRACE_S)
    for number in range(1001, 1000 + MOST):
        strangers.discard(number)
    flood(strangers, "10.0.0.2", MOST - 1, GRACE_S, first=6000)
    assert strangers.displaceable(GRACE_S) == 5000


def test_launchers_that_have_identified_themselves_make_room_for_as_many_more() -> None:
    strangers = Strangers()
    flood(strangers, "10.0.0.2", MOST)
    assert strangers.are_full(0)
    assert not strangers.are_full(1)
    strangers.discard(1000)
    strangers.discard(1000)
    assert not strangers.are_full(0)
    assert len(strangers) == MOST - 1


def test_the_connection_with_most_unread_bytes_goes_when_all_have_too_many() -> None:
    strangers = Strangers()
    flood(strangers, "10.0.0.2", 3)
    strangers.add(1, "10.0.0.1", 0.0)
    assert strangers.buffers(1, 60_000) is None
    assert strangers.buffers(1000, MOST_BYTES - 60_000) is None
    assert strangers.buffers(1001, 1) == 1000
    strangers.discard(1000)
    assert strangers.buffers(1001, 2) is None
    assert strangers.buffers(77, 10**9) is None  # it has identified itself


def test_a_host_is_one_source_whatever_address_it_takes() -> None:
    assert source_of("::ffff:10.0.0.1") == source_of("10.0.0.1") == "10.0.0.1"
    assert source_of("2001:db8:0:1::1") == source_of("2001:db8:0:1:ffff::2") != source_of("2001:db8:0:2::1")
    assert source_of("fe80::1%eth0") == source_of("fe80::2%eth0")
