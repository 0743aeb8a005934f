"""Which copies a keeper makes, and which it keeps for another node."""

from __future__ import annotations

import os
import time

import pytest

from megatron_ft.link.reactor import Reactor
from megatron_ft.memory.base.keeper_messages import Offer, Prepare
from megatron_ft.memory.keeper import copies
from megatron_ft.memory.keeper.copies import CopyKeeping
from megatron_ft.memory.keeper.segments import Cycle, HeldSegment, Segments, SegmentState
from megatron_ft.memory.rules.snapshots import SnapshotKey

OWN, FOREIGN, WORLD = 0, 1, 2


def of(iteration: int) -> SnapshotKey:
    return SnapshotKey(3, 0, iteration)


class Keeping:
    """A keeper of rank 0 whose copies another node takes at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[SnapshotKey, SnapshotKey | None]] = []
        self.why = ""
        monkeypatch.setattr(copies, "send", self._send)
        self.reactor = Reactor()
        self.segments = Segments(self.reactor, lambda *_: None)
        self.copies = CopyKeeping(self.segments, self.reactor, lambda subject, text: None)
        self.cycle = Cycle(Prepare(3, (OWN,), WORLD, copies_key="00" * 32))
        self.copies.begin(self.cycle)
        self.copies.address = "node-b:1"

    def _send(self, address: str, offer: Offer, *_: object) -> str:
        self.sent.append((offer.key, offer.complete))
        return self.why

    def verified(self, iteration: int) -> None:
        self.segments.add(OWN, os.open(os.devnull, os.O_RDONLY), 8, SegmentState.VERIFIED, of(iteration))

    def told(self, newest: int, complete: int | None = None) -> SnapshotKey | None:
        """What the launcher may be told of, once a copy that this begins has come."""
        if complete is not None:
            self.cycle.complete = self.cycle.settled = of(complete)
        self.copies.may_be_told(of(newest))
        if self.copies._copying is not None:
            assert self.reactor.run_until(lambda: self.copies._copying is None, time.monotonic() + 10)
        return self.copies.may_be_told(of(newest))

    def offered(self, iteration: int, complete: int | None) -> None:
        offer = Offer(of(iteration), (FOREIGN,), WORLD, None if complete is None else of(complete))
        (held,) = self.copies.admit(offer)
        assert isinstance(held, HeldSegment)
        self.segments.received(held, os.open(os.devnull, os.O_RDONLY))
        held.state = SegmentState.VERIFIED

    @property
    def kept(self) -> list[int]:
        return sorted(each.key.iteration for each in self.segments.of(FOREIGN, SegmentState.VERIFIED) if each.key)


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> Keeping:
    return Keeping(monkeypatch)


def test_copy_of_the_complete_snapshot_stays_until_a_newer_one_is_complete(keeping: Keeping) -> None:
    keeping.offered(10, None)
    keeping.offered(20, 10)
    assert keeping.kept == [10, 20]
    keeping.offered(30, 10)  # 20 was passed over
    assert keeping.kept == [10, 30]
    keeping.offered(40, 30)
    assert keeping.kept == [30, 40]


def test_newer_snapshot_is_copied_once_it_is_decided_about_the_one_before(keeping: Keeping) -> None:
    for iteration in (10, 20):
        keeping.verified(iteration)
    assert keeping.told(10) == of(10)
    assert keeping.told(20) == of(10)
    assert keeping.told(20, complete=10) == of(20)
    assert keeping.sent == [(of(10), None), (of(20), of(10))]


def test_snapshot_that_cannot_be_copied_is_told_of_nevertheless(keeping: Keeping) -> None:
    keeping.why = "Connection refused"
    keeping.verified(10)
    assert keeping.told(10) == of(10)
