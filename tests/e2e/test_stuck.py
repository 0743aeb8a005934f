"""Processes that SIGKILL doesn't end, as in a wait for a dead file server: their node is out, the job isn't."""

from __future__ import annotations

import re

import pytest

from tests.support.holding import held
from tests.support.launching import Launcher
from tests.support.nodes import meeting_place, rendezvous_settings

pytestmark = pytest.mark.waits

SCRIPT = """
say("cycle", CYCLE, "of", RANK, "in", os.environ["WORLD_SIZE"], "pid", os.getpid())
while CYCLE == 0 and not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
if CYCLE == 0:
    sys.exit(7) if os.environ.get("FAILS") else forever()
"""


def test_a_node_with_a_stuck_rank_leaves_and_the_job_goes_on(launcher: Launcher) -> None:
    flag = launcher.directory / "flag"
    place = meeting_place("--nnodes=1:2", "--max-restarts=3", "--workers-stop-timeout=1")
    nodes = [
        launcher.start(
            SCRIPT,
            *place,
            rendezvous_settings(is_host=not number, last_call_s=6),
            script_args=[str(flag)],
            env={} if number else {"FAILS": "1"},
        )
        for number in range(2)
    ]
    for node in nodes:
        node.wait_for("^cycle 0 of . in 2")
    pid = int(nodes[1].wait_for(r"^cycle 0 of .* pid (\d+)")[0])
    with held(pid):
        flag.touch()
        good, stuck = [node.wait() for node in nodes]
        words = rf"process {pid} \(\S+, state t\)"
        (left,) = [line for line in stuck.lines if "after SIGKILL" in line]
        assert re.fullmatch(f"{words} still running 10 s after SIGKILL, not waiting any longer", left)
        (event,) = nodes[1].events("stuck")
        assert [process["pid"] for process in event["processes"]] == [pid]
        (ended,) = [line for line in stuck.lines if line.startswith("cycle 0 ended")]
        assert re.fullmatch(
            rf"cycle 0 ended: .* exited with code 7; {words} can't be killed, this node leaves the job", ended
        )
        assert (good.code, stuck.code) == (0, 0)
        assert "cycle 1 of 0 in 1" in good.out
        assert "cycle 1" not in stuck.out
        assert "Traceback" not in good.err + stuck.err
        assert "rendezvous failed" not in good.err + stuck.err
    for node in nodes:
        node.assert_nothing_left()
