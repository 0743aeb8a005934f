"""``--restart-policy min-healthy`` on three hosts with a network between them, and what happens to networks."""

from __future__ import annotations

from tests.e2e.test_launcher_min_healthy import SCRIPT, by_rank, cycles_of, tell
from tests.support.launching import Launched, Launcher, launcher
from tests.support.netns import Hosts, hosts
from tests.support.nodes import rendezvous_settings, wait_for_all

__all__ = ["hosts", "launcher"]


def start_on_each(launcher: Launcher, hosts: Hosts, *options: str, join_timeout_s: int = 600) -> list[Launched]:
    """One launcher on each host; the coordinator is on the first. All ranks run when this returns."""
    place = ["--rdzv-backend=c10d", "--rdzv-endpoint=node1:29500", "--rdzv-id=job"]
    place += [f"{rendezvous_settings(last_call_s=8)},join_timeout={join_timeout_s}"]
    nodes = [
        launcher.start(
            SCRIPT,
            "--nnodes=2:3",
            "--restart-policy=min-healthy",
            *place,
            *options,
            script_args=[str(launcher.directory)],
            host=hosts.inhabitant(number),
        )
        for number in (1, 2, 3)
    ]
    by_rank(nodes)
    return nodes


def rank_of(launched: Launched, cycle: int) -> str:
    return str(launched.wait_for(rf"^cycle {cycle} of (\d)")[0])


def test_first_lost_host_disturbs_nobody_second_failure_restarts(launcher: Launcher, hosts: Hosts) -> None:
    first, second, third = start_on_each(launcher, hosts, "--max-restarts=1")
    hosts.power_off(3, third)
    for node in (first, second):
        node.wait_for(r"node . \(node3\) is lost: .* continuing with 2 healthy nodes", timeout_s=20)
    assert cycles_of(first) == cycles_of(second) == ["0"]
    tell(launcher, f"fail-0-{rank_of(second, 0)}")
    for node in (first, second):
        node.wait_for("^cycle 1 of . in 2 count 1")
    for rank in (0, 1):  # at different times
        tell(launcher, f"finish-1-{rank}")
        if rank == 0:
            by_rank([first, second], cycle=1)[0].wait_for("finished; waiting for 1 other node")
    ended = wait_for_all([first, second])
    assert [finished.code for finished in ended] == [0, 0]
    assert cycles_of(first) == cycles_of(second) == ["0", "1"]


def test_host_that_is_cut_off_gives_up_and_the_others_go_on(launcher: Launcher, hosts: Hosts) -> None:
    first, second, third = start_on_each(launcher, hosts, join_timeout_s=30)
    hosts.cut(3)
    for node in (first, second):
        node.wait_for(r"\(node3\) is lost", timeout_s=20)
    third.wait_for("no coordinator reachable for 2. s .*: terminating the ranks of this node", timeout_s=40)
    cut_off = third.wait(timeout_s=40)
    third.assert_nothing_left()
    assert cut_off.code == 94
    assert "no coordinator reachable that can continue the job: start the job again" in cut_off.lines[-1]
    tell(launcher, "finish")
    assert [finished.code for finished in wait_for_all([first, second])] == [0, 0]
    assert cycles_of(first) == cycles_of(second) == ["0"]
