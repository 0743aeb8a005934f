"""For whom a cycle is ended, and who stands by."""

from __future__ import annotations

import pytest

from megatron_ft.core.membership import Admission, Waiting

WAITING = Waiting(returning=frozenset("a"), joining=frozenset("bc"), spare=frozenset("d"))


@pytest.mark.parametrize(
    ("at_once", "goes_on_without", "wanted", "standing_by"),
    [
        (False, False, 1, "bcd"),  # any-failed: a node of the cycle that waits has ended its ranks
        (True, False, 3, "d"),
        (False, True, 0, "abcd"),  # min-healthy: the others go on without
        (True, True, 3, "d"),  # for whom there is no room, nothing is restarted
    ],
)
def test_for_whom_a_cycle_ends(at_once: bool, goes_on_without: bool, wanted: int, standing_by: str) -> None:
    admission = Admission(at_once=at_once, goes_on_without=goes_on_without)
    assert admission.wanted(WAITING) == wanted
    assert admission.standing_by(WAITING) == frozenset(standing_by)
    assert admission.wanted(Waiting()) == 0


@pytest.mark.parametrize(
    ("at_once", "goes_on_without", "wanted"), [(False, False, 2), (True, False, 2), (False, True, 0), (True, True, 2)]
)
def test_nodes_that_nobody_tells_apart_may_be_of_the_cycle(at_once: bool, goes_on_without: bool, wanted: int) -> None:
    admission = Admission(at_once=at_once, goes_on_without=goes_on_without)
    assert admission.wanted(Waiting(unknown=2)) == wanted
    assert not admission.standing_by(Waiting(unknown=2))
