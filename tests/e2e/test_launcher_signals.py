"""``ft_launcher`` asked to stop, interrupted and killed: what the ranks get, the exit code, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support.launching import Launched, Launcher, wait_until

TWO = ("--nproc-per-node", "2")
OBEYS = """
worker = os.fork()  # as a data loader's
if worker == 0:
    forever()
told = []
def obey(number, frame):
    told.append(number)
    time.sleep(0.2)
    is_left_alone = os.waitpid(worker, os.WNOHANG) == (0, 0)
    say("obeyed", RANK, signal.Signals(number).name, len(told), "worker left alone", is_left_alone)
    os.kill(worker, signal.SIGKILL)
    sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, obey)
say("ready", RANK)
forever()
"""


QUICK_S = 25.0
"""A loaded machine keeps it; whoever waited for a timeout instead (60 s and more in these tests) doesn't."""


def ended_after(launched: Launched, number: int) -> float:
    """Send a signal and wait for the end; seconds."""
    start = time.monotonic()
    launched.signal(number)
    launched.process.wait(30)
    return time.monotonic() - start


def assert_stopped(launched: Launched, *, code: int) -> None:
    """Check the last record of ``result.json``."""
    (life,) = json.loads((launched.log_dir / "result.json").read_text())["lives"]
    assert (life["outcome"], life["exit_code"]) == ("stopped", code)
    assert life["cause"].startswith("stopped by SIG")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_ranks_that_obey_make_exit_code_0_and_a_stopped_result(launcher: Launcher, name: str) -> None:
    options = ["--signals-to-handle=SIGUSR1"] if name == "SIGUSR1" else []
    launched = launcher.start(OBEYS, *TWO, "--max-restarts=3", *options)
    launched.wait_for("^ready", count=2)
    launched.signal(signal.Signals[name])
    if name == "SIGTERM":  # Slurm sends it to each process of a step, and once more: that is one request
        time.sleep(0.02)
        launched.signal(signal.SIGTERM)
    finished = launched.wait()
    assert finished.code == 0
    assert not [line for line in finished.lines if "again: killing" in line]
    assert sorted(line for line in finished.out.splitlines() if "obeyed" in line) == [
        f"obeyed 0 {name} 1 worker left alone True",
        f"obeyed 1 {name} 1 worker left alone True",
    ]
    (asked,) = launched.events("stop_requested")
    assert (asked["signal"], asked["ranks"]) == (name, 2)
    assert "1800 s" in finished.lines[1]
    assert launched.ends() == [(None, "request", "give_up", 3)]
    assert launched.events("cycle_ended")[0]["outcome"] == "stopped"
    assert [code for code, _ in launched.exits().values()] == [0, 0]
    assert "Traceback" not in finished.err
    assert_stopped(launched, code=0)


def test_ranks_that_die_of_sigterm_or_are_killed_after_the_term_timeout_make_exit_code_1(launcher: Launcher) -> None:
    script = "if RANK: signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay('ready', RANK)\nforever()"
    launched = launcher.start(script, *TWO, "--max-restarts=3", "--term-timeout=0.7")
    launched.wait_for("^ready", count=2)
    assert 0.7 <= ended_after(launched, signal.SIGTERM) < QUICK_S
    finished = launched.wait()
    assert finished.code == 1
    assert [end[:3] for end in launched.ends()] == [(None, "request", "give_up")]
    assert [launched.exits()[rank][0] for rank in (0, 1)] == [-signal.SIGTERM, -signal.SIGKILL]
    assert_stopped(launched, code=1)
    assert "killed by SIGTERM and 1 more" in finished.lines[-1]


def test_second_request_kills_at_once(launcher: Launcher) -> None:
    script = "signal.signal(signal.SIGINT, lambda *a: say('told'))\nsay('ready')\nforever()"
    launched = launcher.start(script)
    launched.wait_for("^ready")
    launched.signal(signal.SIGINT)
    launched.wait_for(r"again after 5 s kills them\)")
    launched.wait_for("^told")
    launched.signal(signal.SIGINT)
    launched.wait_for(
        r"received SIGINT again: the ranks are still ending, SIGINT or SIGTERM in [345]\.\d s or later kills them"
    )
    time.sleep(5.0)
    assert ended_after(launched, signal.SIGINT) < QUICK_S
    finished = launched.wait()
    assert finished.code == 130
    assert "received SIGINT again: killing the ranks" in finished.lines


def test_sigint_interrupts_all_ranks_and_a_hangup_that_nohup_ignores_stays_ignored(fresh_launcher: Launcher) -> None:
    script = """
say("ready", RANK)
try:
    forever()
except KeyboardInterrupt:
    say("interrupted", RANK)
"""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launched = fresh_launcher.start(script, *TWO, "--max-restarts=3")
        launched.wait_for("^ready", count=2)
    finally:
        signal.signal(signal.SIGHUP, previous)
    launched.signal(signal.SIGHUP)
    with open(f"/proc/{launched.process.pid}/status") as file:
        (ignored,) = [int(line.split()[1], 16) for line in file if line.startswith("SigIgn")]
    assert ignored & (1 << (signal.SIGHUP - 1))
    launched.signal(signal.SIGINT)
    finished = launched.wait()
    assert finished.code == 130
    assert finished.out.count("interrupted") == 2
    assert "Traceback" not in finished.err


def test_sigint_while_torch_is_imported_ends_silently_with_130(fresh_launcher: Launcher) -> None:
    launched = fresh_launcher.start("say('ready')")
    maps = Path(f"/proc/{launched.process.pid}/maps")
    wait_until(lambda: "libtorch" in maps.read_text(), 60)
    launched.signal(signal.SIGINT)
    finished = launched.wait()
    assert (finished.code, finished.out, finished.err) == (130, "", "")


def test_loader_workers_that_ignore_sigterm_survive_a_signal_to_every_process(launcher: Launcher) -> None:
    """As Slurm sends it to a step. Without the line of docs/slurm.md the next batch raises, and nothing is saved."""
    script = """
import torch
from torch.utils.data import DataLoader
def ignore(worker):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
loader = DataLoader(range(10**6), num_workers=2, worker_init_fn=ignore)
for step, batch in enumerate(loader):
    if step == 5:
        say("ready")
    if asked and step > 50:
        say("saved", batch.item() == step)
        break
    time.sleep(0.01)
"""
    launched = launcher.start(script)
    launched.wait_for("^ready")
    time.sleep(0.2)
    for process in launched.alive():
        if process.pid not in launched.monitor_pids().values():
            os.kill(process.pid, signal.SIGTERM)
    finished = launched.wait()
    assert "saved True" in finished.out, finished.out + finished.err
    assert finished.code == 0


def test_child_of_a_shell_wrapper_gets_sigterm_once_and_has_time(launcher: Launcher) -> None:
    inner = """
import signal, sys, time
asked = 0
def ask(number, frame):
    global asked
    asked += 1
signal.signal(signal.SIGTERM, ask)
print("ready", flush=True)
while not asked:
    time.sleep(0.01)
time.sleep(0.7)
print("saved", asked, flush=True)
"""
    path = launcher.directory / "inner.py"
    path.write_text(inner)
    command = ["bash", "-c", f"{sys.executable} {path}; true"]
    launched = launcher.start(command, "--no-python", "--term-timeout=60", "--workers-stop-timeout=0.1")
    launched.wait_for("^ready")
    assert ended_after(launched, signal.SIGTERM) < QUICK_S
    assert "saved 1" in launched.wait().out


@pytest.mark.parametrize("monitors", ["that work", "that are stopped", "that are stopped, without setpriv"])
def test_killed_launcher_leaves_nothing(launcher: Launcher, monitors: str) -> None:
    """Chaos seed 212: not even monitors that are stopped. Ranks ask the kernel for their end, by setpriv or not."""
    script = """
import ctypes
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number))
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    say("death signal", number.value, "parent", os.getppid(), "leader", os.getpid() == os.getpgrp() == os.getsid(0))
say("ready")
forever()
"""
    path = "/nonexistent" if "without" in monitors else os.environ["PATH"]
    fresh = ["--ft-preload=none"] if "stopped" in monitors else []  # a fork asks by itself
    launched = launcher.start(script, *TWO, *fresh, env={"PATH": path})
    launched.wait_for("^ready", count=4)
    ended_by_kernel = f"death signal 9 parent {launched.process.pid} leader True"
    assert launched.wait_for("^death signal.*", count=2) == [ended_by_kernel] * 2
    pids = launched.monitor_pids().values()
    if "stopped" in monitors:
        # which they call themselves when they have asked the kernel for that
        wait_until(lambda: all(Path(f"/proc/{pid}/comm").read_text().startswith("ft_monitor") for pid in pids), 20)
        os.kill(launched.process.pid, signal.SIGSTOP)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    launched.signal(signal.SIGKILL)
    launched.process.wait()
    launched.assert_nothing_left()
