"""``ft_launcher`` end to end: how ranks are started and seen to end, restarts, and what is told."""

from __future__ import annotations

import os
import re

from tests.support.launching import Launcher

TWO = ("--nproc-per-node", "2")


def test_an_exception_before_monitoring_has_begun_is_named(launcher: Launcher) -> None:
    """Chaos seed 127."""
    script = "def main(): raise ValueError('no such file')\nmain()"
    finished = launcher.run(script)
    assert finished.code == 1
    assert "rank 0 raised ValueError: no such file, in script.py:9 main" in finished.lines[-1]
    assert finished.err.rstrip().endswith(finished.lines[-1])


def test_leftovers_of_a_rank_are_ended(launcher: Launcher) -> None:
    # a child in the group, one that tidies up, one that ignores SIGTERM, one in a group of its own
    script = """
import subprocess
hold = [sys.executable, "-c", "import time; time.sleep(600)"]
deaf = [*hold[:2], "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
tidy = [*hold[:2], "import signal, time; signal.signal(15, lambda *a: (open('tidy', 'w'), exit())); time.sleep(600)"]
kinds = ((hold, None), (deaf, None), (hold, lambda: os.setpgid(0, 0)), (tidy, None))
children = [subprocess.Popen(command, preexec_fn=prepare) for command, prepare in kinds]
say("children", *(child.pid for child in children))
if CYCLE == 0:
    while open(f"/proc/{children[3].pid}/status").read().split("SigCgt:")[1].split()[0][-4] != "4":
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
os._exit(0)
"""
    # without it, who tidies up has a tenth of a second
    launched = launcher.start(script, "--max-restarts=1", "--workers-stop-timeout=5")
    finished = launched.wait()
    assert finished.code == 0
    pids = [int(word) for line in re.findall(r"children (.*)", finished.out) for word in line.split()]
    assert len(pids) == 8
    assert (launched.directory / "tidy").exists()  # asked before it was killed
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    (note,) = [line for line in finished.lines if "left processes behind" in line]
    assert all(str(pid) in note for pid in pids[4:])  # said of the rank that ended well, not of the killed one


def test_stopped_rank_and_its_children_end_with_the_cycle_and_one_that_ignores_sigterm_after_the_stop_timeout(
    launcher: Launcher,
) -> None:
    script = """
def stopped(pid):
    return "State:\\tT" in open(f"/proc/{pid}/status").read()
if CYCLE == 0:
    if RANK == 0:
        child = os.fork()
        if child == 0:
            forever()
        os.kill(child, signal.SIGSTOP)
        open("pids.new", "w").write(f"{os.getpid()} {child}")
        os.rename("pids.new", "pids")
        os.kill(os.getpid(), signal.SIGSTOP)
    while not os.path.exists("pids") or not all(map(stopped, open("pids").read().split())):
        time.sleep(0.01)
    sys.exit(5)
if CYCLE == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if RANK == 0:
        open("deaf", "w").close()
        forever()
    while not os.path.exists("deaf"):
        time.sleep(0.01)
    sys.exit(5)
say("again", RANK)
"""
    launched = launcher.start(script, *TWO, "--max-restarts=2", "--workers-stop-timeout=1")
    finished = launched.wait()
    assert finished.code == 0
    assert [end[:2] for end in launched.ends()] == [(1, "crash"), (1, "crash"), (None, None)]
    assert len(re.findall("^again", finished.out, re.MULTILINE)) == 2
    # rank 0 is continued, else the signal would wait with it
    assert launched.exits() == {0: (-15, True), 1: (5, False)}
    first, second = (e for e in launched.events("rank_exited") if e["cycle"] == 1)
    assert (second["rank"], second["exitcode"], second["by_us"]) == (0, -9, True)
    assert 1.0 <= (second["t"] - first["t"]) / 1e9 < 5.0


def test_survivors_of_a_failure_have_little_time_unless_the_job_ends(launcher: Launcher) -> None:
    """Nothing can be saved together any more, and the job waits; at its end there is no hurry."""
    script = """
if RANK == 0:
    def obey(number, frame):
        say("asked", CYCLE)
        time.sleep(2)
        say("obeyed", CYCLE)
        sys.exit(0)
    signal.signal(signal.SIGTERM, obey)
    open(f"ready.{CYCLE}", "w")
    forever()
while not os.path.exists(f"ready.{CYCLE}"):
    time.sleep(0.01)
sys.exit(5)
"""
    finished = launcher.run(script, *TWO, "--max-restarts=1")
    assert finished.code == 1
    assert finished.out.splitlines() == ["asked 0", "asked 1", "obeyed 1"]


def test_redirects_tee_and_error_files_stay_torchs(launcher: Launcher) -> None:
    logs = launcher.directory / "torch_logs"
    script = "print('to out', RANK); print('to err', RANK, file=sys.stderr)"
    finished = launcher.run(script, *TWO, "--log-dir", str(logs), "--redirects", "1", "--tee", "2", "--role", "trainer")
    assert finished.code == 0
    assert "to out" not in finished.out + finished.err
    assert sorted(re.findall(r"^\[trainer\d\]:to err \d$", finished.err, re.MULTILINE)) == [
        "[trainer0]:to err 0",
        "[trainer1]:to err 1",
    ]
    assert sorted(p.read_text() for p in logs.glob("*/attempt_0/*/stdout.log")) == ["to out 0\n", "to out 1\n"]
