"""What one node of several does early, late or not at all: it finishes, is drained, can't go on. The others know."""

from __future__ import annotations

import re
import resource

import pytest

from tests.support.launching import Launcher, wait_until
from tests.support.nodes import coordinator_of, meeting_place, wait_for_all

pytestmark = pytest.mark.waits


def test_launcher_that_fails_itself_is_lost_and_says_why(launcher: Launcher) -> None:
    script = """
say("cycle", CYCLE, "of", RANK, "in", os.environ["WORLD_SIZE"])
while CYCLE == 0:
    if RANK == 0 and os.path.exists(f"{sys.argv[1]}/fail"):
        sys.exit(7)
    time.sleep(0.02)
"""
    place = meeting_place("--nnodes=1:2", "--max-restarts=2")
    where = [str(launcher.directory)]
    nodes = [launcher.start(script, *place, "--node-rank=0", script_args=where)]
    wait_until(lambda: coordinator_of(nodes[0]) is not None)  # with the other's launcher it would end
    nodes.append(launcher.start(script, *place, "--node-rank=1", script_args=where))
    for node in nodes:
        node.wait_for("^cycle 0 of . in 2")
    resource.prlimit(nodes[1].process.pid, resource.RLIMIT_NOFILE, (3, 3))  # it can open nothing more
    (launcher.directory / "fail").touch()
    goes_on, failed = wait_for_all(nodes)
    assert (goes_on.code, failed.code) == (0, 1)
    why = r"OSError: \[Errno 24\] Too many open files"
    assert re.search(f"^the launcher failed: {why}", failed.lines[-1])
    # it didn't get as far as another cycle
    told = rf"node 1 \(.+\) is lost: its launcher failed: {why}"
    assert re.search(told, goes_on.err)
    assert "cycle 1 of 0 in 1\n" in goes_on.out


def test_launcher_that_comes_after_the_end_finds_it_in_the_log_directory_once_nobody_answers(
    launcher: Launcher,
) -> None:
    place = meeting_place("--nnodes=1:2", f"--ft-log-dir={launcher.directory}/logs")
    first = launcher.start("say('done')", *place, "--rdzv-conf=is_host=1,last_call_timeout=0.5")
    assert first.wait().code == 0
    late = launcher.start("say('again')", *place, "--rdzv-conf=is_host=0,join_timeout=1.5").wait()
    assert (late.code, late.out) == (0, "")
    assert "the job finished before, as its result.json says: nothing to do" in late.err
