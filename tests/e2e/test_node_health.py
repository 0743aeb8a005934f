"""``--ft-node-health-command``: a node that isn't fit stands aside, the others go on, and nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

import pytest

from megatron_ft.launcher.arguments import parse
from megatron_ft.launcher.processes.health_command import HealthCheck, job_directories
from megatron_ft.link.facts.launcher import NodeHealth
from megatron_ft.link.linux.processes import read_stat
from megatron_ft.link.reactor import Reactor
from tests.e2e.test_membership import STANDS_BY
from tests.support.holding import held
from tests.support.launching import Launched, Launcher, wait_until
from tests.support.nodes import TRAINS_UNTIL_TOLD, cycles_of, meeting_place, tell, wait_for_all

pytestmark = pytest.mark.waits


def nothing() -> None:
    pass


def checked(reactor: Reactor, command: str, *, timeout_s: float | None = 30.0) -> NodeHealth:
    health = HealthCheck(command, timeout_s=timeout_s, reactor=reactor, known_children=set)
    found = health.run(7, {"FT_CYCLE": "7"}, nothing)
    assert health.pids() == set()
    return found


@pytest.mark.parametrize(
    ("command", "ended", "code", "last_line"),
    [
        ('test "$FT_CYCLE" = 7 && echo fine', "", 0, "fine"),
        ('echo "${FT_SECRET-none}, $FT_SECRET_FILE"', "", 0, "none, /home/me/secret"),
        ("echo one; echo two >&2; exit 3", "exited with code 3", 3, "two"),
        ("kill -SEGV $$", "was killed by SIGSEGV", -11, ""),
        ("yes", "took longer than 0.3 s", None, "y"),
    ],
)
def test_health_check_tells_how_its_command_ended_and_shows_it_no_secret(
    reactor: Reactor, monkeypatch: pytest.MonkeyPatch, command: str, ended: str, code: int | None, last_line: str
) -> None:
    monkeypatch.setenv("FT_SECRET", "0123456789abcdef")
    monkeypatch.setenv("FT_SECRET_FILE", "/home/me/secret")
    found = checked(reactor, command, timeout_s=0.3 if code is None else None)
    assert (found.text, found.exit_code, found.last_line) == (ended, code, last_line)


def is_gone(path: Path) -> bool:
    stat = read_stat(int(path.read_text()))
    return stat is None or stat.state in "ZX"


def test_health_command_past_its_timeout_is_killed_with_all_its_children(reactor: Reactor, tmp_path: Path) -> None:
    child = tmp_path / "pid"
    script = f"trap '' TERM; sleep 600 & echo $! > {child}; echo looking; wait"
    found = checked(reactor, script, timeout_s=0.5)
    assert (found.text, found.exit_code, found.last_line) == ("took longer than 0.5 s", None, "looking")
    assert 0.5 <= found.seconds < 15
    wait_until(lambda: is_gone(child), 10)


def test_reactor_is_served_while_a_health_command_cannot_be_ended_and_that_is_waited_for_once(reactor: Reactor) -> None:
    health = HealthCheck("exec sleep 600", timeout_s=0.5, reactor=reactor, known_children=set)
    served: list[float] = []
    with contextlib.ExitStack() as hold:
        reactor.call_later(0.0, lambda: hold.enter_context(held(*health.pids())))
        reactor.call_later(1.0, lambda: served.append(time.monotonic()))
        assert health.run(0, {}, nothing).text == "took longer than 0.5 s"
        assert served
        (pid,) = health.pids()
        began_s = time.monotonic()
        again = health.run(0, {}, nothing)
        assert again.text == f"can't run: process {pid} (sleep, state t) of the previous check can't be killed"
        health.close()  # as at the end of the launcher
        assert time.monotonic() - began_s < 1.0
    wait_until(lambda: health.run(0, {}, nothing).text.startswith("took longer"), 10)


def test_health_check_runs_before_each_round_and_again_until_it_passes(launcher: Launcher) -> None:
    rounds = launcher.directory / "rounds"
    command = f"echo $FT_CYCLE of $TORCHELASTIC_RUN_ID on $LOCAL_WORLD_SIZE >> {rounds}; "
    command += f"test $(wc -l < {rounds}) -gt 1 || {{ echo GPU 5 is missing >&2; exit 3; }}"
    script = "sys.exit(7 if CYCLE == 0 else 0)"
    options = ("--max-restarts=1", "--rdzv-id=job", "--ft-segment-health-check-dir=5")
    finished = launcher.run(script, *options, f"--ft-node-health-command={command}")
    assert finished.code == 0
    assert [line.split(" of ")[0] for line in rounds.read_text().splitlines()] == ["0", "0", "1"]
    assert all(line.endswith(" on 1") for line in rounds.read_text().splitlines())
    assert finished.lines[:3] == [
        "--ft-segment-health-check-dir has no effect outside a job of Slurm",
        "node health check failed: exited with code 3 (GPU 5 is missing); retrying in 2 s",
        "node health check passed after 1 failure: joining",
    ]
    events = launcher.launches[0].events("node_health")
    assert [(event["cycle"], event["good"], event["exit_code"]) for event in events] == [
        (0, False, 3),
        (0, True, 0),
        (1, True, 0),
    ]


def start(launcher: Launcher, number: int, *options: str) -> Launched:
    """Its health is what the file of its number says; there is none as long as it is well."""
    ill = launcher.directory / f"ill{number}"
    return launcher.start(
        TRAINS_UNTIL_TOLD,
        *options,
        f"--ft-node-health-command=test ! -e {ill} || {{ echo ill; exit 4; }}",
        f"--rdzv-conf=is_host={int(not number)}",
        script_args=[str(launcher.directory)],
    )


def test_unfit_node_is_left_out_and_used_again_at_the_next_restart(launcher: Launcher) -> None:
    ill = 1
    place = meeting_place("--nnodes=1:2", "--max-restarts=3")
    nodes = [start(launcher, number, *place) for number in range(2)]
    for node in nodes:
        node.wait_for("^cycle 0 of . in 2")
    well = nodes[1 - ill]
    tell(launcher, f"ill{ill}")
    tell(launcher, "fail-0-0")
    nodes[ill].wait_for(r"node health check failed: exited with code 4 \(ill\); retrying in 2 s")
    well.wait_for("^cycle 1 of 0 in 1")
    os.unlink(launcher.directory / f"ill{ill}")
    nodes[ill].wait_for("node health check passed after . failure")
    nodes[ill].wait_for(STANDS_BY.format("1 node runs"))
    well.wait_for(f"1 node on standby for the next restart: {socket.gethostname()}")
    assert cycles_of(well) == ["0", "1"]
    tell(launcher, "fail-1-0")
    for node in nodes:
        node.wait_for("^cycle 2 of . in 2")
    tell(launcher, "finish")
    assert [finished.code for finished in wait_for_all(nodes)] == [0, 0]


def test_command_gets_the_directories_of_the_job(reactor: Reactor, tmp_path: Path) -> None:
    line = parse([f"--ft-checkpoint-iteration-file={tmp_path}/ck/latest.txt", __file__])
    directories = job_directories(line.options, str(tmp_path))
    command = 'echo "$FT_JOB_DIRECTORIES"'
    health = HealthCheck(command, timeout_s=30.0, reactor=reactor, known_children=set, directories=directories)
    assert health.run(0, {}, nothing).last_line == f"{tmp_path}:{tmp_path}/ck"


def test_check_while_ranks_run_is_reported_ends_nothing_and_keeps_no_restart_waiting(launcher: Launcher) -> None:
    ill, slow = launcher.directory / "ill", launcher.directory / "slow"
    command = f"test ! -e {ill} || {{ echo link is down; exit 3; }}; "
    command += f"test ! -e {slow} || {{ touch {slow}.begun; test $FT_CYCLE = 1 || sleep 60; }}"
    options = [f"--ft-node-health-command={command}", "--ft-node-health-check-interval=0.3", "--max-restarts=1"]
    launched = launcher.start(TRAINS_UNTIL_TOLD, *options, script_args=[str(launcher.directory)])
    launched.wait_for("^cycle 0")
    ill.touch()
    launched.wait_for(r"node health check failed while ranks run: exited with code 3 \(link is down\); ranks run on")
    ill.unlink()
    launched.wait_for("node health check passed again while ranks run")
    slow.touch()
    wait_until(Path(f"{slow}.begun").exists)
    began_s = time.monotonic()
    tell(launcher, "fail-0-0")
    launched.wait_for("^cycle 1")
    assert time.monotonic() - began_s < 40
    tell(launcher, "finish")
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert sum("failed while ranks run" in line for line in finished.lines) == 1
    assert {event["good"] for event in launched.events("node_health")} == {True, False}


def test_node_of_a_marked_segment_joins_once_the_mark_is_gone(launcher: Launcher) -> None:
    mark = launcher.directory / "segment_health_check.13.7"
    mark.write_text("node07,node08")
    options = [f"--ft-segment-health-check-dir={launcher.directory}", "--ft-enable-dist-storage-healthcheck=true"]
    array = {"SLURM_ARRAY_JOB_ID": "13", "SLURM_ARRAY_TASK_ID": "7"}
    launched = launcher.start("say('runs')", *options, env=array)
    launched.wait_for(
        r"node health check failed: exited with code 1 \(segment: marked as unhealthy by .*\.13\.7: node07,node08\)"
    )
    mark.write_text("")
    finished = launched.wait()
    assert (finished.code, finished.out) == (0, "runs\n"), finished.err
