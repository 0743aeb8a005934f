"""What ranks ask of their launcher, honoured on all nodes: the end of the job, and the exclusion of a node."""

from __future__ import annotations

import re

from tests.support.launching import Finished, Launched, Launcher
from tests.support.nodes import meeting_place, rendezvous_settings, wait_for_all

# the node that shall ask is told by its environment: ranks are handed out as nodes arrive
SCRIPT = """
from megatron_ft import RankMonitorClient, WorkloadAction, WorkloadControlRequest
say("cycle", CYCLE, "of", RANK, "in", os.environ["WORLD_SIZE"])
if CYCLE == 0 and os.environ.get("ASKS"):
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
    request = WorkloadControlRequest(WorkloadAction[os.environ["ASKS"]], "bad GPU")
    RankMonitorClient().send_workload_control_request(request)
    if os.environ["ASKS"] != "Continue":
        os._exit(9)  # dies at once
if CYCLE or os.environ.get("ASKS") == "Continue":
    sys.exit(0)
while not os.path.exists(sys.argv[1] + "-finish"):
    time.sleep(0.02)
"""


def start(launcher: Launcher, asks: str, *, nodes: int, nnodes: str, asking: int) -> list[Launched]:
    """The first one's launcher starts the coordinator. All ranks run when this returns; then they may ask."""
    place = meeting_place(f"--nnodes={nnodes}", "--workers-stop-timeout=1")
    flag = str(launcher.directory / "flag")
    launched = [
        launcher.start(
            SCRIPT,
            *place,
            rendezvous_settings(is_host=not number, last_call_s=6),
            script_args=[flag],
            env={"ASKS": asks} if number == asking else {},
        )
        for number in range(nodes)
    ]
    for one in launched:
        one.wait_for(rf"^cycle 0 of . in {nodes}")
    (launcher.directory / "flag").touch()
    return launched


def ended_lines(finished: Finished) -> str:
    [line] = [line for line in finished.lines if line.startswith("cycle 0 ended: ")]
    return line


def test_shutdown_ends_all_nodes(launcher: Launcher) -> None:
    asking = 1
    nodes = start(launcher, "ShutdownWorkload", nodes=2, nnodes="2", asking=asking)
    ended = wait_for_all(nodes)
    assert [finished.code for finished in ended] == [1, 1]
    (asked,) = nodes[asking].events("workload_control")
    assert (asked["action"], asked["description"]) == ("ShutdownWorkload", "bad GPU")
    for node, finished in zip(nodes, ended, strict=True):
        assert [end[1:3] for end in node.ends()] == [("request", "give_up")]
        assert f"rank {asked['rank']} asked for ShutdownWorkload: bad GPU" in ended_lines(finished)
        assert "Traceback" not in finished.err
        assert "rendezvous failed" not in finished.err


def test_excluded_node_leaves_and_the_others_restart(launcher: Launcher) -> None:
    asking = 0
    nodes = start(launcher, "ExcludeThisNode", nodes=3, nnodes="2:3", asking=asking)
    ended = wait_for_all(nodes)
    assert [finished.code for finished in ended] == [0, 0, 0]
    for number, finished in enumerate(ended):
        if number == asking:
            assert ended_lines(finished).endswith("asked for ExcludeThisNode: bad GPU; this node leaves the job")
            # it stays to the end, as srun would have it
            began = nodes[1 - asking].events("cycle_started")
            assert [each["cycle"] for each in began][-1] == 1
            assert nodes[asking].events("run_ended")[0]["t"] > began[-1]["t"]
        else:
            assert re.search(
                r"node . \(.+\) leaves the job: rank . asked for ExcludeThisNode: bad GPU; restarting as cycle 1",
                ended_lines(finished),
            )
            assert "in 2" in finished.out
