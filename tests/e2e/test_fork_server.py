"""The fork server is safe or isn't used: bad preloads, servers that die or stand still, and a hundred restarts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import ROOT, Launched, Launcher, clean_environment, fresh_launcher, launcher, wait_until

__all__ = ["fresh_launcher", "launcher"]

TWO = ("--nproc-per-node", "2")
COMPUTES = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(3)
dist.all_reduce(total)
wide = torch.ones(600, 600, requires_grad=True)
(wide @ wide).sum().backward()
say(RANK, CYCLE, int(total[0]), os.environ["RANK"], *(name in sys.modules for name in sys.argv[1:]))
dist.destroy_process_group()
"""
MODULES = {
    "starts_thread": "import threading, time; threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
    "runs_operation": "import torch; torch.ones(3000, 3000).sum(); torch.ones(2000, 2000) @ torch.ones(2000, 2000)",
    "touches_cuda": "import torch; torch.cuda.is_initialized = lambda: True",
    "reads_rank": "import os; RANK = int(os.environ.get('RANK', 0))",
    "raises": "raise RuntimeError('not today')",
    "exits": "raise SystemExit(3)",
    "hangs": "import time\nwhile True: time.sleep(1)",
    "kills_itself": "import os; os.kill(os.getpid(), 9)",
    "harmless": "import os; os.environ['SET_BY_HARMLESS'] = 'yes'; VALUE = 17",
}
WHY = {
    "starts_thread": "it started a thread",
    "touches_cuda": "it touched CUDA",
    "reads_rank": "it reads RANK while it is imported",
    "raises": "RuntimeError: not today",
    "exits": "SystemExit: 3",
    "hangs": "its import took longer than 2 s",
    "kills_itself": "the fork server died while it was imported",
    "nowhere": "ModuleNotFoundError: No module named 'nowhere'",
}


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    directory = tmp_path / "modules"
    directory.mkdir()
    for name, text in MODULES.items():
        (directory / f"{name}.py").write_text(text)
    return directory


def states(launched: Launched, state: str) -> list[dict[str, Any]]:
    return [event for event in launched.events("fork_server") if event["state"] == state]


def path_with(directory: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{directory}{os.pathsep}{ROOT}"}


def left_out(launched: Launched) -> dict[str, str]:
    return dict(re.findall(r"--ft-preload: (\S+) is left out: (.*)", launched.err))


def test_bad_preloads_are_left_out_and_the_good_one_stays(launcher: Launcher, modules: Path) -> None:
    names = [*WHY, "harmless"]
    launched = launcher.start(
        COMPUTES.replace("say(", "say(os.environ.get('SET_BY_HARMLESS'), "),
        *(*TWO, f"--ft-preload={','.join(names)}", "--ft-preload-timeout=2"),
        env=path_with(modules),
        script_args=names,
    )
    finished = launched.wait(110)
    launched.assert_nothing_left()
    assert finished.code == 0, finished.err
    assert left_out(launched) == WHY
    flags = " ".join("True" if name == "harmless" else "False" for name in names)
    assert sorted(finished.out.splitlines()) == [f"yes {rank} 0 2 {rank} {flags}" for rank in (0, 1)]
    assert not launched.events("fork_failed")


def test_an_operation_that_starts_threads_is_left_out(launcher: Launcher, modules: Path) -> None:
    """Ranks that are forked behind one hang at their first operation."""
    launched = launcher.start(
        COMPUTES,
        *(*TWO, "--ft-preload=runs_operation"),
        env={**path_with(modules), "OMP_NUM_THREADS": "2"},
        script_args=["runs_operation"],
    )
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert left_out(launched) == {"runs_operation": "it started a thread"}
    assert sorted(finished.out.splitlines()) == ["0 0 2 0 False", "1 0 2 1 False"]
    assert states(launched, "ready")


RESTARTS = """
open(f"pid.{RANK}.{CYCLE}", "w").write(str(os.getpid()))
say("ready", RANK, CYCLE, "torch" in sys.modules)
while not os.path.exists(f"go.{CYCLE}"):
    time.sleep(0.005)
if CYCLE < 2 and RANK == 1:
    os._exit(7)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_a_server_that_is_ended_or_stopped_is_replaced(launcher: Launcher, how: int) -> None:
    launched = launcher.start(RESTARTS, *TWO, "--max-restarts=2")
    launched.wait_for("^ready", count=2)
    first = states(launched, "started")[0]["pid"]
    os.kill(first, how)
    wait_until(lambda: len(states(launched, "ready")) == 2, 60)
    (launched.directory / "go.0").touch()
    launched.wait_for("^ready", count=4)
    # and in the very moment of a restart: then the ranks are fresh interpreters, or wait for the next server
    os.kill(states(launched, "started")[-1]["pid"], how)
    (launched.directory / "go.1").touch()
    (launched.directory / "go.2").touch()
    finished = launched.wait()
    launched.assert_nothing_left()
    assert finished.code == 0, finished.err
    assert "ready 1 1 True" in finished.out
    assert "ready 1 2" in finished.out
    killed = "SIGTERM" if how == signal.SIGTERM else "SIGKILL"
    assert f"the fork server ended ({killed}), which hurts no rank; a new one is started" in finished.lines


def test_an_interrupt_that_comes_before_a_rank_can_take_it_is_not_lost(tmp_path: Path) -> None:
    """Chaos seed 156: the server ignores SIGINT, and so did a rank for a moment; then it waited for the others."""
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(5)\nprint('went on')\n")
    command = [sys.executable, "-m", "tests.support.early_interrupt", str(script)]
    finished = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, check=True)
    assert finished.stdout == f"ended with {-signal.SIGINT}\n"
    assert finished.stderr.endswith("KeyboardInterrupt\n")


def test_servers_that_keep_dying_are_given_up(launcher: Launcher) -> None:
    launched = launcher.start(RESTARTS, *TWO, "--max-restarts=2")
    launched.wait_for("^ready", count=2)
    for count in range(1, 6):
        wait_until(lambda count=count: len(states(launched, "started")) >= count, 30)
        os.kill(states(launched, "started")[-1]["pid"], signal.SIGKILL)
        wait_until(lambda count=count: len(states(launched, "ended")) >= count, 30)
    for cycle in range(3):
        (launched.directory / f"go.{cycle}").touch()
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert "the fork server died 5 times; ranks start as fresh interpreters" in finished.lines
    assert "ready 1 2 False" in finished.out


@pytest.mark.parametrize(
    ("options", "env", "reason"),
    [
        (["--no-python"], {}, "the ranks aren't run by this Python"),
        ([], {"PYTHON_EXEC": "/usr/bin/env"}, "the ranks aren't run by this Python"),
        (["--run-path"], {}, "the script isn't a file"),
        ([], dict.fromkeys("ABC", "é" * 60_000), "their environment or command line is too large"),
    ],
)
def test_what_only_a_fresh_interpreter_can_run(
    launcher: Launcher, tmp_path: Path, options: list[str], env: dict[str, str], reason: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    words = ["echo", "ran"] if options == ["--no-python"] else [str(script)]
    launched = launcher.start(words, *options, env=env)
    finished = launched.wait()
    assert finished.lines[0] == f"ranks start as fresh interpreters: {reason}"
    if "PYTHON_EXEC" not in env:  # which doesn't know -u
        assert (finished.code, finished.out) == (0, "ran\n")
    assert not [stat for stat in launched.alive() if stat.comm == "ft_fork_server"]


def test_a_file_beside_the_script_that_hides_an_imported_module(fresh_launcher: Launcher) -> None:
    (fresh_launcher.directory / "queue.py").write_text("print('mine')")
    script = fresh_launcher.directory / "hidden.py"
    script.write_text("import queue")
    launched = fresh_launcher.start([str(script)])
    finished = launched.wait()
    assert finished.out == "mine\n"
    assert "ranks start as fresh interpreters: queue beside the script hides a module of that name" in finished.lines


def test_a_hundred_restarts_leave_nothing(launcher: Launcher) -> None:
    """No restart is lost, and neither processes, descriptors, ports, memory nor files pile up."""
    script = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if RANK == 0:
    launcher = os.getppid()
    fds = os.listdir(f"/proc/{launcher}/fd")
    inodes = {os.readlink(f"/proc/{launcher}/fd/{fd}") for fd in fds if os.path.lexists(f"/proc/{launcher}/fd/{fd}")}
    tables = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/{launcher}/net/{name}")]
    ports = sum(words[3] == "0A" and f"socket:[{words[9]}]" in inodes for words in tables)
    children = len(open(f"/proc/{launcher}/task/{launcher}/children").read().split())
    rss = int(open(f"/proc/{launcher}/statm").read().split()[1]) * 4
    say(CYCLE, len(fds), ports, children, rss)
dist.barrier()
if CYCLE < 100:
    if RANK == 1:
        os._exit(1)
    dist.barrier()
dist.destroy_process_group()
"""
    launched = launcher.start(script, *TWO, "--standalone", "--max-restarts=100")
    finished = launched.wait(100)
    launched.assert_nothing_left()
    assert finished.code == 0, finished.err
    assert finished.lines[-1] == "all ranks finished after 101 cycles"
    rows = [tuple(map(int, line.split())) for line in finished.out.splitlines()]
    cycles, fds, ports, children, rss = zip(*rows, strict=True)
    assert list(cycles) == list(range(101))
    # a few come and go, like those of a server that is being made
    assert max(fds[len(fds) // 2 :]) <= max(fds[: len(fds) // 2]) + 5
    assert max(ports) == 2  # of the rendezvous, and of this round
    assert max(children) <= 6
    pids = {rank["pid"] for event in launched.events("cycle_started") for rank in event["ranks"]}
    assert len(pids) == 202
    assert [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in pids)] == []
    assert rss[-1] - rss[len(rss) // 5] < 20_000, "KiB"
    assert states(launched, "started")[0] == states(launched, "started")[-1]
    assert not launched.events("fork_failed")
