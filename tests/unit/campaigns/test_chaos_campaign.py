"""What a chaos campaign makes of its runs: results, an exit code, a table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import run as campaign
from tests.chaos.plan import Outcome
from tests.chaos.table import table


def result(seed: int, *problems: str, **changes: Any) -> dict[str, Any]:
    told = {"seed": seed, "layout": "dp", "faults": [], "cycles": 1, "seconds": 2.0, "problems": list(problems)}
    return {**told, "directory": None, "says": f"seed {seed}", **changes}


def test_earlier_failure_counts_when_a_campaign_continues(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def main(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["run.py", f"--out={tmp_path}", "--jobs=1", *words])
        return campaign.main()

    failing = {1}
    for name in ("heed_the_terminal", "clock_library"):
        monkeypatch.setattr(campaign, name, lambda *_: None)
    monkeypatch.setattr(campaign, "undisturbed", lambda *_: {})
    monkeypatch.setattr(
        campaign, "run_seed", lambda plan, *_, **__: result(plan.seed, *["bad"] * (plan.seed in failing))
    )
    assert main("--runs=1") == 0
    assert main("--runs=2") == 1
    assert main("--runs=3") == 1
    assert [each["seed"] for each in campaign.read_results(tmp_path)] == [0, 1, 2]
    assert main("--only", "0") == 0
    assert main("--only", "1") == 1


def test_summary_names_the_command_that_repeats_each_failure() -> None:
    said = campaign.summary([result(1), result(2, "bad"), result(3, "bad", layout="dp3")])
    assert "run.py --only 2\n" in said
    assert said.endswith("run.py --hosts --only 3")
    assert "--only 1" not in said


def test_the_table_counts_what_happened_as_what_it_may_come_to() -> None:
    """The results of older campaigns don't tell what was hit."""
    new = [["gil", "exit", None, True], ["gil", "step", 2.0, True], ["server_killed", "step", None, False]]
    old = [["gil", "setup", 4.0], ["server_killed", "load", None]]
    lines = table([result(1, faults=new), result(2, faults=old)]).splitlines()[2:]
    assert lines == [
        f"| `gil` | {Outcome.ENDS} | setup, step | 2 | 3.00 s (4.0 s) |",
        f"| `gil` | {Outcome.MAY_END} | exit | 1 |  |",
        f"| `server_killed` | {Outcome.NOTHING} | load | 1 |  |",
    ]
