"""Lines about other nodes."""

from __future__ import annotations

import pytest

from megatron_ft.core.job_view import NodeReport
from megatron_ft.core.restart_policy import NodeState
from megatron_ft.launcher import node_lines


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        (
            {"here": ["a", "b"], "more": 1, "missing": ["c"], "cycle": 3},
            "waiting for 1 more node (2 of 3 are here: a, b; missing since cycle 3: c)",
        ),
        ({"here": ["a"], "more": 2}, "waiting for 2 more nodes (1 of 3 is here: a)"),
        ({"here": [], "more": 2}, "waiting for 2 more nodes (0 of 2 are here)"),
        (
            {"here": ["a", "b"], "more": 0, "lost": ["c"], "cycle": 0},
            "waiting for more nodes to come (2 are here: a, b; lost in cycle 0: c)",
        ),
        (
            {"here": [str(number) for number in range(10)], "more": 1},
            "waiting for 1 more node (10 of 11 are here: 0, 1, 2, 3, 4, 5, 6, 7 and 2 more)",
        ),
    ],
)
def test_for_whom_a_round_waits(facts: dict[str, object], line: str) -> None:
    assert node_lines.waiting_for_nodes(**facts) == line  # type: ignore[arg-type]


def test_failure_of_another_node_names_it() -> None:
    report = NodeReport(NodeState.UNHEALTHY, "node-b", "rank 3 killed by SIGKILL (not by us) at iteration 25")
    told = node_lines.failed(number=1, report=report)
    assert told == "node 1 (node-b): rank 3 killed by SIGKILL (not by us) at iteration 25"


def test_a_node_is_lost_while_the_others_meet() -> None:
    report = NodeReport(NodeState.LOST, "node-b", "its launcher was not heard of for 2 s")
    lines = [node_lines.lost_between(number=1, report=report, are_enough=enough) for enough in (True, False)]
    assert lines == [
        "node 1 (node-b) is lost: its launcher was not heard of for 2 s; the other nodes meet without it",
        "node 1 (node-b) is lost: its launcher was not heard of for 2 s; the other nodes are too few, and wait for it "
        "or for one in its place",
    ]
