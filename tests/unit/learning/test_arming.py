"""Armed timeouts: what follows from the launcher's order and the rank's own timeouts."""

from __future__ import annotations

import pytest

from megatron_ft.core.board.layout import FLAG_ARE_LEARNED, ArmedTimeout, SectionView
from megatron_ft.learning.arming import with_armed
from megatron_ft.learning.messages import Arm
from tests.fuzz.healthy import BOARD

S = 1_000_000_000
STEP = SectionView("step", 0, 0, None)
LEARNED = 5.0
STRAY = ArmedTimeout(1, enforced=False)


def armed_step(arm: Arm | None, step: SectionView = STEP) -> ArmedTimeout | None:
    (found,) = with_armed(arm, BOARD._replace(sections=(step,))).sections
    return found.armed


@pytest.mark.parametrize("enforced", [True, False])
def test_a_section_without_a_timeout_gets_the_learned_one(enforced: bool) -> None:
    arm = Arm(0, {"step": LEARNED, "save": LEARNED}, enforced)
    assert armed_step(arm) == ArmedTimeout(5 * S, enforced)
    assert armed_step(arm, STEP._replace(name="other")) is None


def test_an_enforced_timeout_replaces_a_configured_one_and_one_that_is_only_reported_does_not() -> None:
    configured = STEP._replace(own_timeout_ns=60 * S)
    assert armed_step(Arm(0, {"step": LEARNED}), configured) is not None
    assert armed_step(Arm(0, {"step": LEARNED}, enforced=False), configured) is None


@pytest.mark.parametrize("enforced", [True, False])
def test_a_calculated_timeout_is_only_replaced_by_a_longer_one_which_is_enforced(enforced: bool) -> None:
    calculated = STEP._replace(own_timeout_ns=4 * S, is_calculated=True)
    assert armed_step(Arm(0, {"step": LEARNED}, enforced), calculated) == ArmedTimeout(5 * S)
    assert armed_step(Arm(0, {"step": LEARNED}, enforced), calculated._replace(own_timeout_ns=8 * S)) is None
    assert armed_step(Arm(0, {"step": LEARNED}, enforced), calculated._replace(own_timeout_ns=None)) is None


def test_the_time_out_of_section_is_armed_under_its_name() -> None:
    found = with_armed(Arm(0, {"out_of_section": LEARNED}), BOARD._replace(own_out_of_section_timeout_ns=None))
    assert (found.armed_out_of_section, found.out_of_section_timeout_ns) == (ArmedTimeout(5 * S), 5 * S)
    calculated = BOARD._replace(own_out_of_section_timeout_ns=8 * S, is_out_of_section_calculated=True)
    assert with_armed(Arm(0, {"out_of_section": LEARNED}), calculated).out_of_section_timeout_ns == 8 * S


def test_heartbeat_timeouts_are_replaced_only_if_they_were_calculated() -> None:
    arm = Arm(0, {"heartbeat": 6.0, "initial_heartbeat": 20.0})
    own = BOARD._replace(own_heartbeat_timeout_ns=3 * S, own_initial_heartbeat_timeout_ns=5 * S)
    found = with_armed(arm, own._replace(heartbeat_flags=FLAG_ARE_LEARNED))
    assert (found.heartbeat_timeout_ns, found.initial_heartbeat_timeout_ns) == (6 * S, 20 * S)
    found = with_armed(arm, own)
    assert (found.heartbeat_timeout_ns, found.initial_heartbeat_timeout_ns) == (3 * S, 5 * S)


@pytest.mark.parametrize("arm", [None, Arm(0)])
def test_stray_words_arm_nothing(arm: Arm | None) -> None:
    strayed = BOARD._replace(
        sections=(STEP._replace(armed=STRAY),),
        armed_out_of_section=STRAY,
        armed_heartbeat_ns=1,
        armed_initial_heartbeat_ns=1,
    )
    assert with_armed(arm, strayed) == BOARD._replace(sections=(STEP,))


def test_a_rank_without_hooks_is_not_armed() -> None:
    found = with_armed(Arm(0, {"out_of_section": LEARNED}), BOARD._replace(watch_only=True))
    assert found.armed_out_of_section is None
