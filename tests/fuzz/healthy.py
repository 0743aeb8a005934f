"""A healthy rank that always needs 90 % of its timeouts, on a node that is stopped now and then, in simulated time."""

from __future__ import annotations

import random

from megatron_ft.link.base.layout import BoardSnapshot, SectionView
from megatron_ft.monitor.rules.hang_detector import HangDetector

_S = 1_000_000_000
_START = 1000 * _S
BOARD = BoardSnapshot(
    start_ns=_START, last_transition_ns=_START, timeouts_version=1, own_out_of_section_timeout_ns=_S // 2, pid=1
)


class SimulatedNode:
    """The rank's time runs only while the node does; both sides read the same clock, as on a real node."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = _START
        self.opened_at = 0
        self.transition = _START
        self.left_ns = 0
        self.steps = 0
        self._begin_phase()

    def run(self, until: int) -> None:
        while self.left_ns <= until - self.now:
            self.now += self.left_ns
            self.transition = self.now
            self.opened_at = 0 if self.opened_at else self.now
            self.steps += 1
            self._begin_phase()
        self.left_ns -= until - self.now
        self.now = until

    def snapshot(self) -> BoardSnapshot:
        """Of the rank's board, now."""
        section = SectionView("step", self.opened_at, 1, _S)
        return BOARD._replace(sections=(section,), last_transition_ns=self.transition)

    def _begin_phase(self) -> None:
        limit = _S if self.opened_at else _S // 2
        self.left_ns = limit * 9 // 10 - self.random.randrange(limit // 20)


def live(events: int, *, says_sigcont: bool) -> None:
    """So many section events, and stops of the whole node at random moments.

    With SIGCONT any stop is seen. Without it (a freezer, a virtual machine), those that outlast the monitor's
    sleep are; the simulated stops are long then.

    Raises:
        AssertionError: the rank was ended.
    """
    node = SimulatedNode(7 if says_sigcont else 8)
    watching = HangDetector(check_interval_ns=5 * _S, last_look_ns=_START)
    wake = _START
    while node.steps < events:
        jitter = node.random.randrange(20_000_000)
        moment = max(node.now, wake) + jitter
        stopped = node.random.random() < 0.003
        if stopped:
            begin = node.now + node.random.randrange(max(1, moment - node.now))
            node.run(begin)
            length = node.random.randrange(_S // 100, 3 * _S) if says_sigcont else node.random.randrange(2 * _S, 9 * _S)
            node.now += length
            # the sleep is a deadline on the clock: what is left of it passes while the node stands still
            moment = node.now if says_sigcont else max(moment, node.now)
        node.run(moment)
        outcome = watching.check(node.snapshot(), node.now, was_stopped=stopped and says_sigcont)
        assert outcome.verdict is None, (node.steps, outcome.verdict)
        assert outcome.next_look_ns is not None
        wake = outcome.next_look_ns
