"""Living with the monitors: they only observe, or they rest while somebody holds a rank with a debugger."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess

import pytest

from megatron_ft.cli import main as cli
from tests.e2e.test_launcher_monitors import CLIENT, sections
from tests.support.launching import START_S, Launcher, wait_until

TWO = ("--nproc-per-node", "2")
TOGETHER = """
say("ready", RANK)
while not os.path.exists("begin"):
    time.sleep(0.01)
"""
UNTIL_GO = """
client.set_iteration(7)
client.start_section("step")
say("in step", RANK)
while not os.path.exists("go"):
    time.sleep(0.01)
client.end_section("step")
client.shutdown_workload_monitoring()
say("done", RANK)
"""


def at_once(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of ``megatron-ft`` here: while a timeout runs, there may be no time to start a process."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = cli.main(words)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def test_observing_only_tells_and_ends_nobody(launcher: Launcher) -> None:
    script = CLIENT + UNTIL_GO.replace('"step")\nsay', '"step") if RANK == 1 else None\nsay').replace(
        'client.end_section("step")', "client.end_all_sections()"
    )
    launched = launcher.start(script, *TWO, "--ft-observe-only", "--max-restarts=1", *sections(0.3))
    launched.wait_for("would be a hang: rank 1 .*not killed .observe-only")
    wait_until(lambda: len(launched.events("verdict", role="monitor")) == 1, 5)
    # the rank is looked at after that, and has to be in its step still
    wait_until(lambda: [*(launched.log_dir / "evidence").glob("*/rank1-*.json")] != [], 20)
    (launched.directory / "go").touch()
    finished = launched.wait()
    assert finished.code == 0
    assert len(finished.lines) == 5
    assert "observe-only" in finished.lines[0]
    assert "rank 1 hung" in finished.lines[2]
    assert "would be a hang: rank 1 in 'step' for" in finished.lines[3]
    assert "(timeout 0.3 s)" in finished.lines[3]
    assert finished.out.count("done") == 2
    (verdict,) = launched.events("verdict", role="monitor")
    assert (verdict["rank"], verdict["iteration"], verdict["cycle"]) == (1, 7, 0)
    assert (verdict["observed_only"], verdict["section"], verdict["timeout_s"]) == (True, "step", 0.3)
    assert launched.events("signalled", role="monitor") == []
    # faulthandler writes at a signal; the rank's own thread needs none
    (page,) = (launched.log_dir / "evidence").glob("*/rank1-*.json")
    evidence = json.loads(page.read_text())
    assert evidence["threads"] == [] or evidence["stacks_by"] != "faulthandler"
    (ended,) = launched.events("cycle_ended")
    assert (ended["outcome"], ended["cause"]) == ("succeeded", None)


@pytest.mark.waits
def test_pause_turns_hang_detection_off_until_resume_after_which_a_hang_is_found(launcher: Launcher) -> None:
    meeting = ("--rdzv-id=pause-me", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
    launched = launcher.start(CLIENT + TOGETHER + UNTIL_GO, *TWO, *meeting, *sections(3.0))
    launched.wait_for("^ready", count=2)
    (launched.directory / "begin").touch()
    launched.wait_for("^in step", count=2)
    asked = at_once("pause", "--pid", str(launched.process.pid))
    assert (asked.returncode, asked.stderr) == (0, "")
    assert asked.stdout == (
        f"paused until `megatron-ft resume`: ft_launcher {launched.process.pid}, job pause-me, 2 ranks here\n"
    )
    # more than the timeout, while nothing happens: there is no condition to wait for
    with pytest.raises(subprocess.TimeoutExpired):
        launched.process.wait(3.5)
    # a monitor that takes the place of another is told, too, and since when
    first = launched.monitor_pids()[0]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: launched.monitor_pids().get(0, first) != first, START_S)
    assert at_once("pause", "--job", "pause-me").stdout.startswith("was paused already: ")
    with pytest.raises(subprocess.TimeoutExpired):
        launched.process.wait(1.0)
    assert launched.events("verdict", role="monitor") == []
    pid = str(launched.process.pid)
    resumed = at_once("resume", "--pid", pid)
    assert resumed.stdout.startswith("resumed: ")
    assert at_once("resume", "--pid", pid).stdout.startswith("was not paused: ")
    # the time of the pause counts for nobody; what is left of the timeout is soon over
    finished = launched.wait()
    assert finished.code == 1
    assert [end[1] for end in launched.ends()] == ["hang"]
    for verdict in launched.events("verdict", role="monitor"):
        assert (verdict["section"], verdict["timeout_s"]) == ("step", 3.0)
        assert 3.0 <= verdict["elapsed_s"] < 5.0
        assert verdict["t"] - launched.events("resumed")[0]["t"] > 1_000_000_000
    lines = [line for line in finished.lines if "monitor" not in line]
    assert lines[1].startswith("paused by process ")
    assert lines[1].endswith(": hang detection is off on this node until `megatron-ft resume`")
    assert lines[2].startswith("hang detection resumed by process ")
    assert [e["ev"] for name in ("paused", "resumed") for e in launched.events(name)] == ["paused", "resumed"]
