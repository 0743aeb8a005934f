"""What the campaign on Megatron-LM reads of the end of a cycle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.campaign import Case, records, wrong_end

ENDED = {"ev": "cycle_ended", "cycle": 0, "iteration": 18, "cause": {"rank": 1, "kind": "signal", "text": "..."}}


def test_the_record_is_found_among_others(tmp_path: Path) -> None:
    lines = [json.dumps(record) for record in ({"ev": "log_opened"}, ENDED, {"ev": "run_ended"})]
    (tmp_path / "launcher-host-1-2.jsonl").write_text("\n".join([*lines, ""]))
    (tmp_path / "monitor-host-1-2.jsonl").write_text(lines[1])
    assert list(records(tmp_path, "cycle_ended")) == [ENDED]


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
