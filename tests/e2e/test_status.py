"""`megatron-ft status` beside a real job: what it shows, and what it does when there is nobody to ask."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from typing import Any

from tests.e2e.test_observe_and_pause import at_once
from tests.support.launching import ROOT, Launched, Launcher, wait_until

TWO = ("--nproc-per-node", "2")
NAMED = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id")
TIMEOUTS = ("--ft-param-rank_section_timeouts=step:60,save:30", "--ft-param-rank_out_of_section_timeout=50")
SCRIPT = """
from megatron_ft import RankMonitorClient
def until(name):
    while not os.path.exists(name):
        time.sleep(0.01)
say("begun", RANK)
if RANK == 1:
    until("attach")
client = RankMonitorClient()
client.init_workload_monitoring()
client.set_iteration(7 + RANK)
client.start_section("step")
if RANK == 1:
    client.start_section("save")
say("in step", RANK)
if CYCLE == 0 and RANK == 1:
    until("crash")
    os._exit(3)
until("go")
client.end_all_sections()
client.shutdown_workload_monitoring()
say("closed", RANK)
until("end")
"""


def job_of(launched: Launched) -> dict[str, Any]:
    shown = at_once("status", "--json", "--pid", str(launched.process.pid))
    assert (shown.returncode, shown.stderr) == (0, "")
    (job,) = json.loads(shown.stdout)["jobs"]
    assert isinstance(job, dict)
    return job


def states(launched: Launched) -> list[str]:
    return [rank["state"] for rank in job_of(launched)["ranks"]]


def touch(launched: Launched, *names: str) -> None:
    for name in names:
        (launched.directory / name).touch()


def finish(launched: Launched) -> None:
    touch(launched, "go", "end")
    assert launched.wait().code == 0


def rehearse_beside_another_job(launcher: Launcher, launched: Launched, name: str, pid: int, other_pid: int) -> None:
    shown = at_once("stacks", "--job", name)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert re.findall(r"^rank: +(\d)", shown.stdout, re.MULTILINE) == ["0", "1"]
    assert re.search(r"main thread .*\n  File .*, in until\n", shown.stdout), shown.stdout
    # a second job of this user on the node: neither its process ids nor its ranks are in the way
    other = launcher.start("say('here', os.getpid())\ntime.sleep(300)", *NAMED, f"{name}-2")
    other.wait_for("^here")
    assert at_once("status", "--pids", "--job", name).stdout == f"0 {pid}\n1 {other_pid}\n"
    ambiguous = at_once("status", "--pids")
    assert (ambiguous.returncode, ambiguous.stdout, ambiguous.stderr.count("\n")) == (2, "", 1)
    for words, complaint in (
        (["kill", "--rank", "0"], "several jobs run on this node"),
        (
            ["kill", "--rank", "2", "--job", name],
            f"--rank 2: not a rank that runs on this node; those of {name} here: 0, 1",
        ),
        (["kill", "--rank", "0", "--signal", "HALT", "--job", name], "'HALT': must be the name or number of a signal"),
        (["pause", "--pid", "1"], "megatron-ft: error: no ft_launcher of yours on this node has --pid 1"),
        (["pause"], "megatron-ft: error: several jobs run on this node, choose one with --pid or --job; "),
    ):
        refused = at_once(*words)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused
        assert complaint in refused.stderr
    assert f"; ft_launcher {launched.process.pid}, job " in refused.stderr
    assert f"; ft_launcher {other.process.pid}, job " in refused.stderr
    assert at_once("kill", "--rank", "0", "--signal", "STOP", "--job", name).returncode == 0
    wait_until(lambda: states(launched) == ["stopped", "running"], 10)
    assert states(other) == ["not_attached"]
    assert at_once("kill", "--rank", "0", "--signal", "sigcont", "--job", name).returncode == 0
    assert at_once("kill", "--rank", "0", "--pid", str(other.process.pid)).returncode == 0
    other.wait()


def test_status_follows_a_job_from_its_start_to_its_end(launcher: Launcher) -> None:
    name = f"look-at-me-{os.getpid()}"  # another copy of this test may run beside this one
    launched = launcher.start(SCRIPT, *TWO, *TIMEOUTS, "--max-restarts=2", *NAMED, name)
    launched.wait_for("^in step 0")
    launched.wait_for("^begun 1")
    assert states(launched) == ["running", "not_attached"]
    touch(launched, "attach")
    launched.wait_for("^in step 1")

    job = job_of(launched)
    assert (job["run_id"], job["launcher_pid"]) == (name, launched.process.pid)
    assert (job["phase"], job["cycle"], job["restarts_left"], job["max_restarts"]) == ("running", 0, 2, 2)
    assert (job["log_dir"], job["world_size"], job["nodes"]) == (str(launched.log_dir), 2, 1)
    assert job["last_cause"] is None
    first, second = job["ranks"]
    assert (first["rank"], first["state"], first["iteration"]) == (0, "running", 7)
    assert [section["name"] for section in first["sections"]] == ["step"]
    assert [section["name"] for section in second["sections"]] == ["step", "save"]
    assert 0 < first["sections"][0]["open_s"] < job["uptime_s"]
    use = second["timeout"]
    assert (use["kind"], use["section"], use["timeout_s"]) == ("section", "save", 30.0)
    assert 0 < use["share"] == use["used_s"] / 30 < 1

    shown = at_once("status", "--once", "--job", name)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"job {name}  ft_launcher {launched.process.pid}, up " in shown.stdout
    assert re.search(r"^cycle 0 running for [\d.]+ s, 2 ranks, 2 of 2 restarts left$", shown.stdout, re.MULTILINE)
    assert re.search(r"^ +0 +step +[\d.]+ s +7 .* % of 1 min 00 s +running *$", shown.stdout, re.MULTILINE)
    assert re.search(r"^ +1 +step > save +[\d.]+ s +8 .* % of 30 s +running *$", shown.stdout, re.MULTILINE)
    # a pipe is no terminal: without --once it ends, too
    assert at_once("status", "--pid", str(launched.process.pid)).returncode == 0

    rehearse_beside_another_job(launcher, launched, name, first["pid"], second["pid"])
    touch(launched, "crash")
    launched.wait_for("^in step 1", count=2)
    job = job_of(launched)
    assert (job["cycle"], job["phase"], job["restarts_left"]) == (1, "running", 1)
    assert (job["last_cause"]["cycle"], job["last_cause"]["rank"]) == (0, 1)
    assert job["last_cause"]["text"].startswith("rank 1 exited with code 3")
    touch(launched, "go")
    launched.wait_for("^closed", count=2)
    assert states(launched) == ["closing", "closing"]
    finish(launched)


class Terminal:
    """A live view in a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self.main, theirs = pty.openpty()
        env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", "LINES": "40", "TERM": "xterm"}
        command = [sys.executable, "-m", "megatron_ft.cli.main", "status", *words]
        self.process = subprocess.Popen(
            command, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self.text = ""

    def wait_for(self, pattern: str, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        self.text = ""
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.text[-3000:]}"
            self._read(0.1)

    def wait(self) -> int:
        """Until it has ended; its exit code."""
        deadline = time.monotonic() + 30
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text
            self._read(0.1)
        self._read(0.1)
        os.close(self.main)
        return self.process.returncode

    def _read(self, wait_s: float) -> None:
        if select.select([self.main], [], [], wait_s)[0]:
            try:
                self.text += os.read(self.main, 1 << 16).decode(errors="replace")
            except OSError:
                time.sleep(wait_s)  # nobody is at the other end any more


def test_live_view_follows_the_job_tells_of_a_stopped_launcher_and_ends_with_the_job_or_before(
    launcher: Launcher,
) -> None:
    launched = launcher.start(SCRIPT, *TWO, *TIMEOUTS, "--max-restarts=2", *NAMED, "live")
    touch(launched, "attach")
    launched.wait_for("^in step", count=2)
    pid = str(launched.process.pid)
    stays, leaves = Terminal("--pid", pid), Terminal("--pid", pid)
    for terminal in (stays, leaves):
        terminal.wait_for("cycle 0 running for")
    leaves.process.send_signal(signal.SIGINT)
    assert leaves.wait() == 0
    assert "Traceback" not in leaves.text
    touch(launched, "crash")
    stays.wait_for(r"cycle 1 running for .*\r\n.*cycle 0 ended: rank 1 exited with code 3")
    stays.wait_for(r"(?s)step > save .*running")
    launched.signal(signal.SIGSTOP)
    try:
        stays.wait_for(f"ft_launcher {pid}, job live, is stopped: ")
        for how in ("--once", "--json"):
            began = time.monotonic()
            shown = at_once("status", how, "--pid", pid)
            assert time.monotonic() - began < 15  # 2 s, on a loaded machine
            assert (shown.returncode, shown.stderr) == (1, f"megatron-ft: ft_launcher {pid}, job live, is stopped\n")
        assert json.loads(shown.stdout) == {"jobs": []}
    finally:
        launched.signal(signal.SIGCONT)
    touch(launched, "go")
    stays.wait_for("monitoring ended")
    finish(launched)
    assert stays.wait() == 0
    assert f"job live: ft_launcher {pid} has exited" in stays.text
