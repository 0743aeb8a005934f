"""``--restart-policy min-healthy`` with three launchers on one machine: who is disturbed by what, and who isn't."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Sequence

import pytest

from megatron_ft.core.job.liveness import lost_s
from tests.support.launching import START_S, Finished, Launched, Launcher, launcher, wait_until
from tests.support.nodes import meeting_place, rendezvous_settings, wait_for_all

__all__ = ["launcher"]
IMPORTED_BEFORE = ()  # torch is enough

GIVING_UP = "no restarts left, giving up"

# each node does what the test's files tell it to
SCRIPT = """
import pathlib
WHERE = pathlib.Path(sys.argv[1])
say("cycle", CYCLE, "of", RANK, "in", os.environ["WORLD_SIZE"], "count", os.environ["TORCHELASTIC_RESTART_COUNT"])
(WHERE / f"pid-{CYCLE}-{RANK}").write_text(str(os.getpid()))
def told(name):
    return (WHERE / name).exists()
while not told("finish") and not told(f"finish-{CYCLE}-{RANK}"):
    if told(f"fail-{CYCLE}-{RANK}"):
        sys.exit(7)
    time.sleep(0.02)
"""


def start_three(launcher: Launcher, *options: str) -> list[Launched]:
    return start_some(launcher, *options, nodes=3)


def start_some(
    launcher: Launcher, *options: str, nodes: int, last_call_s: int = 30, script: str = SCRIPT
) -> list[Launched]:
    """So many, of which one may be lost. The first one founds the job."""
    place = meeting_place(f"--nnodes={nodes - 1}:{nodes}", "--restart-policy=min-healthy", *options)
    return [
        launcher.start(
            script,
            *place,
            rendezvous_settings(is_host=not number, last_call_s=last_call_s),
            script_args=[str(launcher.directory)],
        )
        for number in range(nodes)
    ]


def tell(launcher: Launcher, name: str) -> None:
    (launcher.directory / name).touch()


def cycles_of(launched: Launched) -> list[str]:
    return re.findall(r"^cycle (\d+) of", launched.out, re.MULTILINE)


def by_rank(nodes: Sequence[Launched], cycle: int = 0) -> list[Launched]:
    """Launches in the order of the ranks of a cycle; one rank each."""
    for node in nodes:
        node.wait_for(rf"^cycle {cycle} of")
    found = {int(re.findall(rf"^cycle {cycle} of (\d+)", node.out, re.MULTILINE)[0]): node for node in nodes}
    return [found[rank] for rank in sorted(found)]


def lines_with(ended: Sequence[Finished], pattern: str) -> list[list[str]]:
    return [[line for line in finished.lines if re.search(pattern, line)] for finished in ended]


def test_first_unhealthy_node_of_three_disturbs_nobody_second_restarts_all(launcher: Launcher) -> None:
    nodes = by_rank(start_three(launcher, "--max-restarts=1"))
    tell(launcher, "fail-0-1")
    for node in nodes:
        node.wait_for("continuing with 2 healthy nodes, at least 2 required")
    pids = [(launcher.directory / f"pid-0-{rank}").read_text() for rank in (0, 2)]
    assert all(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert [cycles_of(node) for node in nodes] == [["0"]] * 3
    tell(launcher, "fail-0-2")
    for node in nodes:
        node.wait_for("^cycle 1 of . in 3 count 1")
    again = by_rank(nodes, cycle=1)
    # of other ranks than before: the budget is the job's, not that of each launcher
    tell(launcher, "finish-1-2")
    again[2].wait_for("all ranks of this node finished; waiting for 2 other nodes")
    tell(launcher, "fail-1-0")
    again[0].wait_for("cycle 1: node 0 .* is unhealthy: rank 0 exited with code 7; continuing")
    tell(launcher, "fail-1-1")
    ended = wait_for_all(nodes)
    assert [finished.code for finished in ended] == [1, 1, 1]
    assert [cycles_of(node) for node in nodes] == [["0", "1"]] * 3
    # told alike on all nodes
    for cycle, bad, follows in ((0, (1, 2), "restarting as cycle 1, 0 of 1 restart left"), (1, (0, 1), GIVING_UP)):
        told = "; ".join(rf"node {n} \(.*\) is unhealthy: rank {n} exited with code 7" for n in bad)
        for lines in lines_with(ended, f"^cycle {cycle} ended"):
            assert len(lines) == 1
            assert re.fullmatch(
                f"cycle {cycle} ended: 1 healthy node, at least 2 required: {told}; {follows}", lines[0]
            )
    # torch's table of failures is for nodes that had some
    assert ["FAILED" in finished.err for finished in wait_for_all(again)] == [True, True, False]


def test_nodes_that_finish_at_different_times_restart_nothing(launcher: Launcher) -> None:
    # on a loaded machine it may take so long to finish that the slow node is lost, as it should: then once more
    assert any(one_node_is_slow_to_hear_of_the_end(launcher, attempt) for attempt in range(4))


def one_node_is_slow_to_hear_of_the_end(launcher: Launcher, attempt: int) -> bool:
    """Whether the others finished before it could be taken for lost."""
    launcher.directory = launcher.directory / f"attempt{attempt}"
    launcher.directory.mkdir()
    nodes = by_rank(start_three(launcher))
    for rank in (0, 1):  # one of them has started the coordinator, maybe
        tell(launcher, f"finish-0-{rank}")
        nodes[rank].wait_for("all ranks of this node finished; waiting for")
    assert all(node.process.poll() is None for node in nodes)
    # the other one, which has started the coordinator, waits for it
    slow = next(node for node in nodes if "is_host=0" in str(node.process.args) and node is not nodes[2])
    began = time.monotonic()
    slow.signal(signal.SIGSTOP)
    tell(launcher, "finish-0-2")
    wait_until(lambda: bool(nodes[2].events("cycle_ended")), START_S)
    in_time = time.monotonic() - began < lost_s(len(nodes)) - 0.8
    if in_time:
        with pytest.raises(AssertionError):
            wait_until(lambda: any(node.process.poll() is not None for node in nodes), 0.5)
    slow.signal(signal.SIGCONT)
    ended = wait_for_all(nodes)
    if in_time:
        assert [finished.code for finished in ended] == [0, 0, 0]
        assert [[end[1:3] for end in node.ends()] for node in nodes] == [[(None, "finish")]] * 3
    return in_time


def test_surviving_rank_of_an_unhealthy_node_goes_on(launcher: Launcher) -> None:
    nodes = start_three(launcher, "--nproc-per-node=2", "--workers-stop-timeout=1")
    for node in nodes:
        node.wait_for("^cycle 0 of", count=2)
    tell(launcher, "fail-0-2")
    for node in nodes:
        node.wait_for("node 1 .* is unhealthy: rank 2 exited with code 7")
    survivor = (launcher.directory / "pid-0-3").read_text()
    for rank in (0, 1):
        tell(launcher, f"finish-0-{rank}")
    wait_until(lambda: any("all ranks of this node finished" in node.err for node in nodes), START_S)
    assert os.path.exists(f"/proc/{survivor}")
    for rank in (4, 5):
        tell(launcher, f"finish-0-{rank}")
    ended = wait_for_all(nodes)
    assert [finished.code for finished in ended] == [0, 0, 0]
    assert all("the job finished on 2 of 3 nodes: node 1" in finished.lines[-1] for finished in ended)
    assert "rank 3" not in "".join(finished.err for finished in ended)


def test_late_node_disturbs_nobody_and_takes_part_in_the_next_cycle(launcher: Launcher) -> None:
    place = meeting_place("--nnodes=1:2", "--restart-policy=min-healthy", "--max-restarts=1")
    first = launcher.start(SCRIPT, *place, rendezvous_settings(last_call_s=1), script_args=[str(launcher.directory)])
    first.wait_for("^cycle 0 of 0 in 1")
    late = launcher.start(
        SCRIPT, *place, rendezvous_settings(is_host=False, last_call_s=1), script_args=[str(launcher.directory)]
    )
    late.wait_for("logs: ")
    late.wait_for("on standby for the next restart: 1 node runs without this one")
    first.wait_for(f"1 node on standby for the next restart: {socket.gethostname()}")
    assert cycles_of(first) == ["0"]
    tell(launcher, "fail-0-0")
    for node in (first, late):
        node.wait_for("^cycle 1 of . in 2 count 1")
    tell(launcher, "finish")
    assert [finished.code for finished in wait_for_all([first, late])] == [0, 0]
    assert cycles_of(late) == ["1"]


def test_dead_launcher_and_frozen_launcher_are_lost(launcher: Launcher) -> None:
    # of four: those that are left when the second one goes are half of them, and know that they may go on
    nodes = start_some(launcher, "--max-restarts=1", nodes=4, last_call_s=6)
    host, *others = nodes
    by_rank(nodes)
    others[0].process.kill()
    others[0].process.wait()
    for node in (host, *others[1:]):
        node.wait_for(r"is lost: its launcher exited; continuing with 3 healthy nodes", timeout_s=20)
        assert cycles_of(node) == ["0"]
    os.kill(others[1].process.pid, signal.SIGSTOP)
    host.wait_for("cycle 0 ended: 2 healthy nodes, at least 3 required", timeout_s=20)
    os.kill(others[1].process.pid, signal.SIGCONT)
    for node in (host, *others[1:]):
        node.wait_for("^cycle 1 of . in 3")
    tell(launcher, "finish")
    assert [finished.code for finished in wait_for_all([host, *others[1:]])] == [0, 0, 0]


NEEDS_STORE = """
import datetime, pathlib
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
say("cycle", CYCLE, "of", RANK, "in", os.environ["WORLD_SIZE"])
if CYCLE == 1:
    sys.exit()
while not (pathlib.Path(sys.argv[1]) / "regroup").exists():
    time.sleep(0.02)
say("regroups")
dist.new_group([1, 2], timeout=datetime.timedelta(seconds=20))
"""


def test_rank_that_needs_the_store_of_lost_node_0_fails_and_restarts_the_others(launcher: Launcher) -> None:
    nodes = by_rank(start_some(launcher, "--max-restarts=1", nodes=3, script=NEEDS_STORE))
    lost, *others = nodes
    lost.process.kill()
    lost.process.wait()
    store = "; the ranks' store is lost with node 0: they can't make new process groups until the next restart"
    for node in others:
        node.wait_for(f"node 0 .* is lost: its launcher exited; continuing with 2 healthy nodes, .*{store}$")
    assert [cycles_of(node) for node in others] == [["0"]] * 2  # nobody is disturbed who does without it
    tell(launcher, "regroup")
    for node in others:
        node.wait_for("cycle 0 ended: . healthy nodes?, at least 2 required: node 0 .* is lost", timeout_s=40)
    ended = wait_for_all(others)
    assert [finished.code for finished in ended] == [0, 0]
    assert [cycles_of(node) for node in others] == [["0", "1"]] * 2


def test_single_node_restarts_as_with_any_failed(launcher: Launcher) -> None:
    script = "if CYCLE == 0 and RANK == 0:\n    sys.exit(3)\nif CYCLE == 0:\n    forever()\n"
    finished = launcher.run(script, "--restart-policy=min-healthy", "--nproc-per-node=2", "--max-restarts=1")
    assert finished.code == 0
    assert launcher.launches[0].ends() == [(0, "crash", "restart", 0), (None, None, "finish", 0)]
    assert launcher.launches[0].exits()[0] == (3, False)
