"""Several launchers of one job, here on one machine: one number of the cycle, restarts that cost others nothing."""

from __future__ import annotations

import json
import re
import signal
import socket

import pytest

from tests.support.launching import Finished, Launched, Launcher, free_port
from tests.support.nodes import cycles_of, meeting_place, wait_for_all

pytestmark = pytest.mark.waits


SCRIPT = """
from datetime import timedelta
from torch.distributed import TCPStore
say("cycle", CYCLE, "of", RANK, "restart", os.environ["TORCHELASTIC_RESTART_COUNT"])
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                 timeout=timedelta(seconds=20))
assert not store.check([f"rank{RANK}"])  # a fresh one each cycle
store.set(f"rank{RANK}", "here")
store.get(f"rank{1 - RANK}")
if CYCLE == 0:
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    forever()
"""


FAULTS = """
import atexit
from megatron_ft import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
if RANK == 1:
    if CYCLE == 1:
        client.start_section("step")
    if CYCLE == 2:
        atexit.register(forever)
        atexit.register(lambda: open(sys.argv[1], "w").close())
        raise ValueError("the batch is empty")
if CYCLE == 1:
    forever()
if CYCLE == 2:
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    raise RuntimeError("gloo: Connection closed by peer")
client.shutdown_workload_monitoring()
"""


def run_two(launcher: Launcher) -> tuple[list[Launched], list[Finished]]:
    """Run two nodes through a kill, a hang and an exception of rank 1, to the good end of cycle 3."""
    place = meeting_place("--nnodes=2", "--max-restarts=3", "--ft-rank-section-timeouts=step:1")
    options = {"script_args": [str(launcher.directory / "raised")], "env": {"MEGATRON_FT_SAYS_ALL": "0"}}
    nodes = [launcher.start(SCRIPT + FAULTS, *place, f"--node-rank={number}", **options) for number in (0, 1)]
    return nodes, [node.wait() for node in nodes]


def test_two_nodes_restart_together_know_each_cause_and_print_each_line_once(launcher: Launcher) -> None:
    nodes, ended = run_two(launcher)
    assert [finished.code for finished in ended] == [0, 0]
    assert [cycles_of(node) for node in nodes] == [["0", "1", "2", "3"]] * 2
    # both know at once why, and count the same restart; a node that has lost its peer is not taken for the cause
    causes = [(1, "signal", "restart", 2), (1, "hang", "restart", 1), (1, "crash", "restart", 0)]
    assert [node.ends()[:3] for node in nodes] == [causes, causes]
    assert nodes[1].exits()[1] == (-signal.SIGKILL, False)
    starts = [node.events("cycle_started")[0] for node in nodes]
    assert [event["world_size"] for event in starts] == [2, 2]
    assert sorted(rank["rank"] for event in starts for rank in event["ranks"]) == [0, 1]
    # torch's own count would be another one on each node
    counts = [re.findall("restart (.)$", node.out, re.MULTILINE) for node in nodes]
    assert counts == [["0", "1", "2", "3"]] * 2
    (life,) = json.loads((nodes[0].log_dir / "result.json").read_text())["lives"]
    assert (life["outcome"], life["nodes"], life["cycles"], life["restarts"]) == ("finished", 2, 4, 3)
    killed = "rank 1 killed by SIGKILL (not sent by ft_launcher)"
    fault, *_ = life["faults"]
    assert (fault["kind"], fault["text"], fault["cycle"]) == ("rank", killed, 0)

    host = socket.gethostname()
    stamp = rf"^\[ft_launcher\] \d\d:\d\d:\d\d {re.escape(host)}: (.*)$"
    stamped = [re.findall(stamp, each.err, re.MULTILINE) for each in ended]
    assert all(line in "\n".join(told) for each, told in zip(ended, stamped, strict=True) for line in each.lines)
    told = [line for line in ended[0].lines if "training again" not in line]
    assert told[:3] == [
        "cycle 0 started: 2 ranks on 2 nodes, rank 0 here",
        f"cycle 0 ended: node 1 ({host}): {killed}; restarting as cycle 1, 2 of 3 restarts left",
        "cycle 1 started: 2 ranks on 2 nodes, rank 0 here",
    ]
    hung, raised = (line for line in told if re.match("cycle [12] ended", line))
    assert re.match(r"cycle 1 ended: rank 1 \(.+\) hung in 'step' for .*, in script.py:\d+ forever[;,] ", hung)
    # the one that has lost it is seen first, and the process of the other is still there then
    empty = re.escape(f"rank 1 ({host}) raised ValueError: the batch is empty, in script.py:")
    assert re.search(rf"{empty}\d+ \S+, has not exited", raised)
    assert told[-1] == "all ranks finished after 4 cycles"
    assert ended[1].lines[0] == f"cycle 0: {killed}"
    assert not any(" ended: " in line for line in ended[1].lines)


def test_static_nodes_restart_with_a_fresh_store_and_keep_their_node_ranks(launcher: Launcher) -> None:
    place = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}", "--max-restarts=1"]
    nodes = [launcher.start(SCRIPT, "--rdzv-backend=static", *place, f"--node-rank={number}") for number in (1, 0)]
    assert [finished.code for finished in wait_for_all(nodes)] == [0, 0]
    assert [cycles_of(node) for node in nodes] == [["0", "1"], ["0", "1"]]
    assert "cycle 1 of 1" in nodes[0].out
    assert "cycle 1 of 0" in nodes[1].out
