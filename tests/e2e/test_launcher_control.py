"""What ranks ask of their launcher, honoured on all nodes: the exclusion of a node, and the end of the job."""

from __future__ import annotations

import re

from tests.support.launching import Finished, Launcher
from tests.support.nodes import meeting_place, rendezvous_settings, tell, wait_for_all

# the node that shall ask is told by its environment: ranks are handed out as nodes arrive
SCRIPT = """
from megatron_ft import RankMonitorClient, WorkloadAction, WorkloadControlRequest
say("cycle", CYCLE, "of", RANK, "in", os.environ["WORLD_SIZE"])
while not os.path.exists(f"{sys.argv[1]}/flag-{CYCLE}"):
    time.sleep(0.02)
if (action := os.environ.get(f"ASKS_{CYCLE}")):
    RankMonitorClient().send_workload_control_request(WorkloadControlRequest(WorkloadAction[action], "bad GPU"))
    os._exit(9)  # dies at once
forever()
"""


def line_about(cycle: int, finished: Finished) -> str:
    [line] = [line for line in finished.lines if line.startswith(f"cycle {cycle} ended: ")]
    return line


def test_excluded_node_leaves_the_others_restart_and_shutdown_ends_all_nodes(launcher: Launcher) -> None:
    place = meeting_place("--nnodes=2:3", "--workers-stop-timeout=1")
    asks = ({"ASKS_0": "ExcludeThisNode"}, {"ASKS_1": "ShutdownWorkload"}, {})
    nodes = [
        launcher.start(
            SCRIPT,
            *place,
            rendezvous_settings(is_host=not number, last_call_s=6),
            script_args=[str(launcher.directory)],
            env=env,
        )
        for number, env in enumerate(asks)
    ]
    for cycle, training in enumerate((nodes, nodes[1:])):
        for one in training:
            one.wait_for(f"^cycle {cycle} of . in {len(training)}")
        tell(launcher, f"flag-{cycle}")
    ended = wait_for_all(nodes)
    excluded, *others = nodes
    # it stays to the end, as srun would have it, and has the job's code
    assert [finished.code for finished in ended] == [1, 1, 1]
    assert line_about(0, ended[0]).endswith("asked for ExcludeThisNode: bad GPU; this node leaves the job")
    began = others[0].events("cycle_started")
    assert [each["cycle"] for each in began] == [0, 1]
    assert excluded.events("run_ended")[0]["t"] > began[1]["t"]
    (asked,) = others[0].events("workload_control")
    assert (asked["action"], asked["description"]) == ("ShutdownWorkload", "bad GPU")
    for node, finished in zip(others, ended[1:], strict=True):
        left = r"node . \(.+\) leaves the job: rank . asked for ExcludeThisNode: bad GPU; restarting as cycle 1"
        assert re.search(left, line_about(0, finished))
        assert [end[1:3] for end in node.ends()] == [("membership", "restart"), ("request", "give_up")]
        assert f"rank {asked['rank']} asked for ShutdownWorkload: bad GPU" in line_about(1, finished)
        assert "Traceback" not in finished.err
        assert "rendezvous failed" not in finished.err
