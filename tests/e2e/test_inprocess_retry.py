"""The example of a recovery inside the process: a node loses its rank, the others train on in the same processes."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.launching import ROOT, Launcher
from tests.support.nodes import meeting_place, rendezvous_settings, wait_for_all


def test_ranks_that_are_left_go_on_in_their_processes(launcher: Launcher, tmp_path: Path) -> None:
    place = meeting_place("--nnodes=2:3", "--nproc-per-node=1", "--restart-policy=min-healthy")
    sections = "--ft-rank-section-timeouts=setup:60,step:60,checkpointing:60"
    script = [str(ROOT / "examples" / "inprocess_retry.py"), "--save", str(tmp_path / "save"), "--die", "1:5"]
    nodes = [
        launcher.start([*place, rendezvous_settings(is_host=not number), sections, *script]) for number in range(3)
    ]
    ended = wait_for_all(nodes)
    assert [finished.code for finished in ended] == [0, 0, 0]
    died = [finished for finished in ended if "simulated: rank 1 kills itself" in finished.out]
    left = [finished for finished in ended if finished not in died]
    assert len(died) == 1
    for finished in left:
        # the same process in both attempts, with a new rank in a smaller group
        attempts = re.findall(r"^attempt (\d): rank \d is (\d) of (\d), pid (\d+)$", finished.out, re.MULTILINE)
        assert [(number, size) for number, _, size, _ in attempts] == [("0", "3"), ("1", "2")]
        assert attempts[0][3] == attempts[1][3]
        # as without the fault: no iteration is lost or done twice
        assert re.search(rf"^finished at iteration 30, weight {1 - 0.9**30:.4f}", finished.out, re.MULTILINE)
    for finished in ended:
        assert "cycle 1" not in finished.err
        assert "continuing with 2 healthy nodes, at least 2 required" in finished.err
    # the monitors saw two lives of the survivors, and one of the other
    assert sorted(len(node.events("attached", role="monitor")) for node in nodes) == [1, 2, 2]
