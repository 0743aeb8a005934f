"""``ft_launcher`` end to end: how ranks are started and seen to end, restarts, and what is told."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import Launcher, wait_until

TWO = ("--nproc-per-node", "2")


def test_ranks_have_the_documented_environment_and_the_launcher_prints_two_lines(
    fresh_launcher: Launcher,
) -> None:
    script = """
import json, stat
socket_path = os.environ["FT_RANK_MONITOR_IPC_SOCKET"]
run_dir = os.path.dirname(socket_path)
say(json.dumps({
    "env": {name: value for name, value in os.environ.items()},
    "parent": os.getppid(), "pid": os.getpid(), "group": os.getpgrp(), "session": os.getsid(0),
    "modes": [oct(stat.S_IMODE(os.stat(p).st_mode)) for p in
              (run_dir, socket_path, os.environ["FT_LAUNCHER_IPC_SOCKET"])],
    "argv": sys.argv[1:],
}))
"""
    launched = fresh_launcher.start(script, *TWO, script_args=["--x", "1"])
    finished = launched.wait()
    launched.assert_nothing_left()
    assert finished.code == 0
    assert len(finished.lines) == 2, "a cycle starts, and ends"
    assert "Traceback" not in finished.err
    (ended,) = launched.events("cycle_ended")
    assert (ended["outcome"], ended["action"], ended["cause"]) == ("succeeded", "finish", None)
    (run_ended,) = launched.events("run_ended")
    assert run_ended["exit_code"] == 0
    assert run_ended["t"] - ended["t"] < 2e9  # monitors that don't end by themselves are killed after so long
    ranks = sorted(map(json.loads, finished.out.splitlines()), key=lambda rank: rank["env"]["RANK"])
    assert len(ranks) == 2
    for number, rank in enumerate(ranks):
        env = rank["env"]
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["FT_CYCLE"]) == (
            str(number),
            str(number),
            "2",
            "0",
        )
        assert {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"} <= set(env)
        assert env["FT_RANK_MONITOR_IPC_SOCKET"] != ranks[1 - number]["env"]["FT_RANK_MONITOR_IPC_SOCKET"]
        assert env["FT_LAUNCHER_IPC_SOCKET"] == ranks[1 - number]["env"]["FT_LAUNCHER_IPC_SOCKET"]
        assert rank["parent"] == launched.process.pid
        assert rank["pid"] == rank["group"] == rank["session"]
        assert rank["modes"] == ["0o700", "0o600", "0o600"]
        assert rank["argv"] == ["--x", "1"]


def test_a_forked_launcher_is_like_a_fresh_one(launcher: Launcher, fresh_launcher: Launcher, tmp_path: Path) -> None:
    """What most tests rely on: see ``tests/support/forked_launcher.py``."""
    script = """
import json
def process(pid):
    status = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status"))
    return {
        "words": open(f"/proc/{pid}/cmdline").read().rstrip("\\0").split("\\0"),
        "marked": os.environ["FT_TEST_MARK"] in open(f"/proc/{pid}/environ").read(),
        "leads": os.getsid(pid) == os.getpgid(pid) == pid,
        "cwd": os.readlink(f"/proc/{pid}/cwd"),
        "streams": [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in range(3)],
        **{name: status[name].split() for name in ("Name", "SigBlk", "SigIgn", "SigCgt", "Threads")},
    }
def monitors():
    for pid in map(int, open(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read().split()):
        try:
            name = open(f"/proc/{pid}/comm").read()
        except OSError:
            continue  # it has ended meanwhile
        if name == "ft_monitor_0\\n":
            yield {name: value for name, value in process(pid).items() if name != "Threads"}
monitor, before = [*monitors()], None
while monitor != before or not monitor or not int(monitor[0]["SigCgt"][0], 16) & 1 << signal.SIGTERM - 1:  # it starts
    time.sleep(0.2)
    monitor, before = [*monitors()], monitor
say(json.dumps({
    "launcher": process(os.getppid()), "rank": process(os.getpid()), "environment": sorted(os.environ),
    "monitor": monitor,
    "python": [sys.argv, sys.orig_argv, sys.path, sys.warnoptions, repr(sys.flags)],
    "modules": [name for name in sorted(sys.modules) if name.partition(".")[0] in ("torch", "megatron_ft", "tests")],
}))
"""
    found = []
    for factory in (launcher, fresh_launcher):
        factory.directory = tmp_path / f"of_{factory.imported is None}"
        factory.directory.mkdir()
        launched = factory.start(script)
        assert launched.wait().code == 0
        assert isinstance(launched.process, subprocess.Popen) == (factory is fresh_launcher)
        told = launched.out.replace(str(launched.directory), "DIRECTORY").replace(launched.temp_dir, "TEMPORARY")
        found.append(json.loads(told))
        (monitor,) = found[-1]["monitor"]
        # glibc catches signal 33 in a process that has started a thread, as a monitor does to write a file
        monitor["SigCgt"] = f"{int(monitor['SigCgt'][0], 16) & 0x7FFFFFFF:x}"
        monitor["words"] = [re.sub(r"[^/]+(?=/monitor-)|[\da-f-]{36}|\d+", "X", word) for word in monitor["words"]]
    assert found[0] == found[1]
    assert "megatron_ft.run_ahead.server" in found[0]["modules"]


@pytest.mark.parametrize("path", [os.environ["PATH"], "/nonexistent"], ids=["setpriv", "no setpriv"])
def test_ranks_die_with_their_launcher(launcher: Launcher, path: str) -> None:
    # asked of the kernel by setpriv, where it is installed, else by the launcher's own child; no monitor helps
    script = """
import ctypes
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number))
say("death signal", number.value, "parent", os.getppid(), "leader", os.getpid() == os.getpgrp() == os.getsid(0))
forever()
"""
    launched = launcher.start(script, *TWO, env={"PATH": path})
    told = launched.wait_for("^death signal.*", count=2)
    assert told == [f"death signal 9 parent {launched.process.pid} leader True"] * 2
    wait_until(lambda: bool(launched.events("cycle_started")), 10)
    os.kill(launched.process.pid, signal.SIGSTOP)
    for monitor in launched.monitor_pids().values():
        os.kill(monitor, signal.SIGKILL)
    launched.signal(signal.SIGKILL)
    launched.process.wait()
    ranks = [rank["pid"] for rank in launched.events("cycle_started")[0]["ranks"]]
    wait_until(lambda: not [pid for pid in ranks if os.path.exists(f"/proc/{pid}")], 5)
    for path in Path(launched.temp_dir).iterdir():  # nobody was left to remove it
        shutil.rmtree(path)
    launched.assert_nothing_left()


def test_kill_exit_code_and_exception_restart_one_after_another(torch_launcher: Launcher) -> None:
    script = """
def main():
    raise RuntimeError("boom\\nand more")
if CYCLE == 0 and RANK == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if CYCLE == 1 and RANK == 0:
    sys.exit(3)
if CYCLE == 2 and RANK == 1:
    from torch.distributed.elastic.multiprocessing.errors import record
    record(main)()
if CYCLE < 3:
    forever()
say("done", RANK)
"""
    launched = torch_launcher.start(script, *TWO, "--max-restarts=3")
    finished = launched.wait()
    assert finished.code == 0
    launched.assert_nothing_left()
    assert launched.ends() == [
        (1, "signal", "restart", 2),
        (0, "crash", "restart", 1),
        (1, "crash", "restart", 0),
        (None, None, "finish", 0),
    ]
    assert launched.exits(0) == {0: (-15, True), 1: (-9, False)}
    assert launched.exits(1)[0] == (3, False)
    assert "rank 1 raised RuntimeError: boom and more, in script.py:11 main" in finished.err, "on one line"
    assert [event["ranks"] for event in launched.events("cycle_started")][3][1]["rank"] == 1


def test_an_exception_before_monitoring_has_begun_is_named(launcher: Launcher) -> None:
    """Chaos seed 127; with --ft-log-level DEBUG torch's table has its traceback, too."""
    script = "def main(): raise ValueError('no such file')\nmain()"
    finished = launcher.run(script)
    assert finished.code == 1
    assert "rank 0 raised ValueError: no such file, in script.py:9 main" in finished.lines[-1]
    assert finished.err.rstrip().endswith(finished.lines[-1])
    finished = launcher.run(script, "--ft-log-level=DEBUG")
    assert re.search(r"traceback : Traceback .*ValueError: no such file", finished.err, re.DOTALL)


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


def test_launcher_runs_commands_modules_and_scripts_by_path(launcher: Launcher) -> None:
    finished = launcher.run(
        ["sh", "-c", 'echo "shell $RANK $FT_CYCLE"; test "$FT_CYCLE" = 1'], *TWO, "--no-python", "--max-restarts=1"
    )
    assert finished.code == 0
    assert {"shell 0 1", "shell 1 1"} <= set(finished.out.splitlines())

    package = launcher.directory / "package"
    package.mkdir()
    (package / "module.py").write_text("import sys; print('module', __name__, sys.argv[1:])")
    launched = launcher.start(["-m", "package.module", "a"], env={"PYTHONPATH": str(launcher.directory)})
    assert launched.wait().code == 0

    script = launcher.directory / "by_path.py"
    script.write_text(
        "import os, sys; print('path', __name__, sys.argv, os.getpgrp() == os.getpid())\nraise KeyError('lost')"
    )
    finished = launcher.run(["--run-path", str(script), "x"])
    assert finished.code == 1
    assert f"path __main__ ['{script}', 'x'] True" in finished.out
    assert [event["error"] for event in launcher.launches[-1].events("rank_exited")] == ["KeyError: 'lost'"]


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


def test_event_logs_go_beside_torchs_log_dir_by_default_and_nothing_to_tmp(launcher: Launcher) -> None:
    logs, state = launcher.directory / "torch_logs", launcher.directory / "state"
    env = {"XDG_STATE_HOME": str(state)}
    assert launcher.run("pass", "--ft-log-dir=", "--log-dir", str(logs), env=env).code == 0
    assert list((logs / "megatron_ft").glob("launcher-*.jsonl"))
    assert not state.exists()
    finished = launcher.run("sys.exit(1)", "--ft-log-dir=", "--rdzv-id=../a job", env=env)
    (own,) = (state / "megatron_ft").iterdir()
    assert list(own.glob("launcher-*.jsonl"))
    assert (own.stat().st_mode & 0o777) == 0o700
    assert f"[ft_launcher] logs: {own}\n" in finished.err


def test_python_exec_chooses_the_interpreter_of_the_ranks(launcher: Launcher) -> None:
    finished = launcher.run("say(sys.executable)", env={"PYTHON_EXEC": sys.executable})
    assert finished.out == f"{sys.executable}\n"
