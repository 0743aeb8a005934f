"""Iterations count from 0 inside and from 1 in Megatron-LM's log: each line says which it means."""

from __future__ import annotations

from megatron_ft.core.diagnosis.evidence_page import evidence_text
from megatron_ft.core.iterations import begins, when
from tests.support.evidence import exit_evidence


def test_the_number_is_that_of_the_last_one_in_megatrons_log() -> None:
    assert when(99) == "after iteration 99"
    assert begins(99) == "iteration 100 begins"


def test_nothing_was_done_before_the_first_one() -> None:
    assert when(0) == "in the first iteration"
    assert begins(0) == "iteration 1 begins"


def test_evidence_says_it_alike() -> None:
    assert "iteration:    after iteration 99\n" in evidence_text(exit_evidence(iteration=99))
