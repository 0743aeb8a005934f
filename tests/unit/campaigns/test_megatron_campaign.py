"""What the campaign on Megatron-LM reads of the end of a cycle."""

from __future__ import annotations

from typing import Any

import pytest

from tests.megatron.campaign import Case, wrong_end

ENDED = {"ev": "cycle_ended", "cycle": 0, "iteration": 18, "cause": {"rank": 1, "kind": "signal", "text": "..."}}


@pytest.mark.parametrize(
    ("ended", "problems"),
    [
        (ENDED, 0),
        ({**ENDED, "iteration": 17}, 1),
        ({**ENDED, "cause": {"rank": 0, "kind": "signal"}}, 1),
        ({**ENDED, "cause": {"rank": 1, "kind": "hang"}}, 1),
        ({**ENDED, "cause": None}, 1),
        ({}, 2),
    ],
)
def test_another_rank_kind_or_iteration_is_a_problem(ended: dict[str, Any], problems: int) -> None:
    assert len(list(wrong_end(Case("SIGKILL", (1, "signal"), (18, 19)), ended))) == problems
