"""Several launchers of one job, here on one machine: one number of the cycle, restarts that cost others nothing."""

from __future__ import annotations

import os
import re
import signal
import socket
import time

import pytest

from tests.support.launching import Launched, Launcher, launcher

__all__ = ["launcher"]
IMPORTED_BEFORE = ()  # torch is enough


def meeting_place(*more: str) -> list[str]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    endpoint = f"--rdzv-endpoint=127.0.0.1:{port}"
    return ["--rdzv-backend=c10d", endpoint, "--rdzv-id=job", "--local-addr=127.0.0.1", *more]


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


def cycles_of(launched: Launched) -> list[str]:
    return re.findall(r"^cycle (\d+) of", launched.out, re.MULTILINE)


def started(launched: Launched) -> list[int]:
    """Cycles; a rank may be ended before it says anything."""
    return [event["cycle"] for event in launched.events("cycle_started")]


def test_two_nodes_restart_together_and_agree_on_the_cycle(launcher: Launcher) -> None:
    place = meeting_place("--nnodes=2", "--max-restarts=1")
    nodes = [launcher.start(SCRIPT, *place) for _ in range(2)]
    ended = [node.wait() for node in nodes]
    assert [finished.code for finished in ended] == [0, 0]
    assert [cycles_of(node) for node in nodes] == [["0", "1"], ["0", "1"]]
    # both know at once why, and count the same restart
    assert [node.ends()[0] for node in nodes] == [(1, "signal", "restart", 0)] * 2
    assert [node.exits()[1] for node in nodes if 1 in node.exits()] == [(-signal.SIGKILL, False)]
    here = [node.events("cycle_started")[0] for node in nodes]
    assert [event["world_size"] for event in here] == [2, 2]
    assert sorted(rank["rank"] for event in here for rank in event["ranks"]) == [0, 1]
    # torch's own count would be another one on each node
    assert [re.findall("restart .$", node.out, re.MULTILINE) for node in nodes] == [["restart 0", "restart 1"]] * 2


def test_loss_of_the_founding_launcher_ends_the_other_after_the_join_timeout(launcher: Launcher) -> None:
    """Its coordinator lives on, and the other node waits for one in its place, but not for ever."""
    place = meeting_place("--nnodes=2", "--max-restarts=1", "--rdzv-conf=join_timeout=5")
    host = launcher.start("say('ready')\nforever()", *place, "--node-rank=0")
    other = launcher.start("say('ready')\nforever()", *place, "--node-rank=1", "--rdzv-conf=join_timeout=5,is_host=0")
    host.wait_for("^ready")
    other.wait_for("^ready")
    host.process.kill()
    killed_s = time.monotonic()
    host.process.wait()
    finished = other.wait()
    assert 5 < time.monotonic() - killed_s < 30
    assert finished.code == 94
    assert "node 0 (" in finished.err
    assert "its launcher exited; restarting as cycle 1" in finished.err
    assert finished.lines[-1] == "1 more node did not join within 5 s"
    assert "Traceback" not in finished.err
    assert "frame #" not in finished.err, "a backtrace of torch's C++"


def test_lines_about_the_job_are_printed_once_with_time_and_node(launcher: Launcher) -> None:
    place = meeting_place("--nnodes=2", "--max-restarts=1")
    nodes = [launcher.start(SCRIPT, *place, env={"MEGATRON_FT_SAYS_ALL": "0"}) for _ in range(2)]
    ended = [node.wait() for node in nodes]
    assert [finished.code for finished in ended] == [0, 0]
    host = re.escape(socket.gethostname())
    stamped = [re.findall(rf"^\[ft_launcher\] \d\d:\d\d:\d\d {host}: (.*)$", each.err, re.MULTILINE) for each in ended]
    assert all(line in "\n".join(told) for each, told in zip(ended, stamped, strict=True) for line in each.lines)
    (first, other) = sorted((finished.lines for finished in ended), key=len, reverse=True)
    assert [line for line in first if "training again" not in line] == [
        "cycle 0 started: 2 ranks on 2 nodes, rank 0 here",
        f"cycle 0 ended: node 1 ({socket.gethostname()}): rank 1 killed by SIGKILL (not sent by ft_launcher); "
        "restarting as cycle 1, 0 of 1 restart left",
        "cycle 1 started: 2 ranks on 2 nodes, rank 0 here",
        "all ranks finished after 2 cycles",
    ]
    assert other == ["cycle 0: rank 1 killed by SIGKILL (not sent by ft_launcher)"]
    for node in nodes:  # the event log has it on each node
        assert [record["cycle"] for record in node.events("cycle_ended")] == [0, 1]


@pytest.mark.parametrize("count", [2, 3])
def test_a_launcher_in_the_place_of_the_one_that_founded_the_job_brings_it_back_to_work(
    launcher: Launcher, count: int
) -> None:
    script = "say('cycle', CYCLE, 'of', RANK)\nif CYCLE == 0:\n    forever()\n"
    place = meeting_place(f"--nnodes={count}", "--max-restarts=1")

    def start(rank: int) -> Launched:
        return launcher.start(script, *place, f"--rdzv-conf=is_host={int(rank == 0)}", f"--node-rank={rank}")

    nodes = [start(rank) for rank in range(count)]
    for node in nodes:
        node.wait_for("^cycle 0 of")
    nodes[0].process.kill()
    nodes[0].process.wait()
    for node in nodes[1:]:
        node.wait_for(r"cycle 0 ended: node 0 \(.+\): its launcher exited")
    nodes[0] = start(0)
    assert [node.wait().code for node in nodes] == [0] * count
    assert [started(node) for node in nodes] == [[1], *[[0, 1]] * (count - 1)]
    assert [node.ends()[0] for node in nodes[1:]] == [(None, "membership", "restart", 0)] * (count - 1)
    assert "cycle 1 of 0" in nodes[0].out


def test_restarts_are_counted_once_for_the_job_and_all_give_up_together(launcher: Launcher) -> None:
    # one rank fails in each cycle, on another node each time; nobody else notices
    script = "say('cycle', CYCLE, 'of', RANK)\nif RANK == CYCLE:\n    sys.exit(7)\nforever()\n"
    place = meeting_place("--nnodes=3", "--max-restarts=2")
    nodes = [launcher.start(script, *place) for _ in range(3)]
    ended = [node.wait() for node in nodes]
    assert [finished.code for finished in ended] == [1, 1, 1]
    assert [started(node) for node in nodes] == [[0, 1, 2]] * 3
    told = [(0, "crash", "restart", 1), (1, "crash", "restart", 0), (2, "crash", "give_up", 0)]
    for node in nodes:
        assert node.ends() == told
        assert [node.exits(cycle).get(cycle, (7, False)) for cycle in range(3)] == [(7, False)] * 3
        assert "Traceback" not in node.err
    # torch's table of failures is for the node whose rank it was
    assert sorted("FAILED" in finished.err for finished in ended) == [False, False, True]


def test_hang_is_known_on_the_other_node(launcher: Launcher) -> None:
    script = """
from megatron_ft import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
say("cycle", CYCLE, "of", RANK)
if CYCLE == 0:
    if RANK == 1:
        client.start_section("step")
    forever()
client.shutdown_workload_monitoring()
"""
    place = meeting_place("--nnodes=2", "--max-restarts=1", "--ft-rank-section-timeouts=step:1")
    nodes = [launcher.start(script, *place) for _ in range(2)]
    ended = [node.wait() for node in nodes]
    assert [finished.code for finished in ended] == [0, 0]
    for finished in ended:
        [line] = [line for line in finished.lines if line.startswith("cycle 0 ended: ")]
        assert re.match(r"cycle 0 ended: rank 1 \(.+\) hung in 'step' for .*, in script.py:8 forever[;,] ", line)
    kinds = [event["cause"]["kind"] for node in nodes for event in node.events("cycle_ended") if event["cycle"] == 0]
    assert kinds == ["hang", "hang"]


def test_rank_that_waits_for_a_silent_node_is_not_accused(launcher: Launcher) -> None:
    """Chaos, three hosts, seed 35: one of them was silent, and couldn't tell what it had seen."""
    script = """
import torch
from megatron_ft import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
torch.distributed.init_process_group("gloo")
torch.distributed.barrier()
if sys.argv[1] == "waits":
    client.start_section("step")
    say("waits")
    torch.distributed.all_reduce(torch.zeros(1))
forever()
"""
    place = meeting_place("--nnodes=2", "--ft-rank-section-timeouts=step:2")
    waits = launcher.start(script, *place, "--rdzv-conf=is_host=1", script_args=["waits"])
    silent = launcher.start(script, *place, "--rdzv-conf=is_host=0", script_args=["stands still"])
    waits.wait_for("^waits")
    for stat in silent.alive():
        os.kill(stat.pid, signal.SIGSTOP)
    waits.wait_for("cycle 0 ended: ")
    assert "continuing with" not in waits.err
    (line,) = re.findall(r"cycle 0 ended: .*", waits.err)
    assert re.match(
        r"cycle 0 ended: hang detected \(first on rank (\d): hung in 'step' for .*\), "
        r"root cause undetermined; candidates: rank (?!\1)\d \(no evidence received\); ",
        line,
    )


def test_a_rank_that_is_slow_to_end_of_its_exception_is_the_cause_on_all_nodes(launcher: Launcher) -> None:
    """Chaos, three hosts, seeds 13 and 34: the others had lost it before its process had ended."""
    script = f"""
import atexit
from megatron_ft import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
raised = {str(launcher.directory / "raised")!r}
if CYCLE == 0 and RANK == 1:
    atexit.register(forever)
    atexit.register(lambda: open(raised, "w").close())
    raise ValueError("the batch is empty")
if CYCLE == 0:
    while not os.path.exists(raised):
        time.sleep(0.01)
    raise RuntimeError("gloo: Connection closed by peer")
client.shutdown_workload_monitoring()
"""
    place = meeting_place("--nnodes=2", "--max-restarts=1")
    nodes = [launcher.start(script, *place) for _ in range(2)]
    ended = [node.wait() for node in nodes]
    assert [finished.code for finished in ended] == [0, 0]
    for finished in ended:
        [line] = [line for line in finished.lines if line.startswith("cycle 0 ended: ")]
        # the one that has lost it is seen first, and its process is still there then
        what = "raised ValueError: the batch is empty, has not exited, in script.py:"
        assert f"rank 1 ({socket.gethostname()}) {what}" in line


def test_static_rendezvous_restarts_on_all_nodes_in_step(launcher: Launcher) -> None:
    # nobody can wait there to be noticed; the announcement is what the other node restarts for
    script = "say('cycle', CYCLE, 'of', RANK)\nif CYCLE == 0:\n    sys.exit(7) if RANK == 1 else forever()\n"
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    place = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}", "--max-restarts=1"]
    nodes = [launcher.start(script, *place, f"--node-rank={number}") for number in range(2)]
    assert [node.wait().code for node in nodes] == [0, 0]
    assert [started(node) for node in nodes] == [[0, 1]] * 2
    assert [node.ends()[0] for node in nodes] == [(1, "crash", "restart", 0)] * 2
    assert [node.exits()[1] for node in nodes if 1 in node.exits()] == [(7, False)]
