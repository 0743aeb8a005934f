"""A job that is stopped writes its last memory checkpoint into a directory, and the next life goes on from there."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.e2e.test_memory_checkpoints import (
    ITERATIONS,
    beginnings,
    script,
    weights,
    without_memory,
)
from tests.support.extras import skip_module_without
from tests.support.launching import Finished, Launched, Launcher, wait_until
from tests.support.nodes import meeting_place

skip_module_without("xxhash")

__all__ = ["without_memory"]

IMPORTED_BEFORE = ()  # torch is enough

pytestmark = pytest.mark.timeout(300)

STOPPED_AT = 6
WAITS = f"""
def before(iteration):
    if not os.path.exists("second_life") and iteration == {STOPPED_AT}:
        open(f"waits.{{RANK}}", "w").close()
        forever()
    until = time.monotonic() + 60  # later snapshots are complete a moment after all ranks have saved them
    while iteration == {ITERATIONS - 1} and os.listdir("snapshots") and time.monotonic() < until:
        time.sleep(0.05)
"""


def test_both_nodes_of_a_stopped_job_go_on_where_they_were_in_the_next_life(
    launcher: Launcher, without_memory: Finished
) -> None:
    directory = launcher.directory / "snapshots"
    text = script(f"{WAITS}os.chdir({str(launcher.directory)!r})\n")

    def start() -> list[Launched]:
        place = meeting_place("--nnodes=2", "--nproc-per-node=1", f"--ft-memory-checkpoint-dir={directory}")
        return [launcher.start(text, *place, f"--node-rank={rank}") for rank in (0, 1)]

    first = start()
    wait_until(lambda: all((launcher.directory / f"waits.{rank}").exists() for rank in (0, 1)), 120)
    for node in first:
        node.signal(signal.SIGTERM)
    stopped = [node.wait(150) for node in first]
    # that all ranks have the last one is known a moment after they have saved it
    (written,) = re.findall(r"wrote iteration [56] to (\S+) \(.* of this node, .* s\)", stopped[0].err)
    begins = STOPPED_AT if f"iteration-{STOPPED_AT}-" in written else STOPPED_AT - 1
    assert sorted(os.listdir(written)) == ["rank-0", "rank-1"]
    for path in launcher.directory.glob("0.*"):
        path.unlink()  # what the ranks of cycle 0 meet by
    (launcher.directory / "second_life").touch()
    ended = [node.wait(150) for node in start()]
    assert [each.code for each in ended] == [0, 0], ended[0].err + ended[1].err
    assert beginnings(*ended, cycle=0) == [begins, begins]
    assert f"restored iteration {begins} from the files of an earlier life" in ended[0].err
    assert weights(*ended) == weights(without_memory)
    assert os.listdir(directory) == []  # later snapshots were complete
