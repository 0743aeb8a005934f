"""The last moments of ``ft_launcher``, when its job is over: whatever happens in them, its exit code is the job's."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.launching import clean_environment

SCRIPT = """
import atexit, os, sys, threading, time
from megatron_ft.launcher import main as launcher_main
from megatron_ft.launcher.outcome import LauncherEnd

class Aborts:
    def __del__(self, abort=os.abort):  # as C++ does, when a thread comes back to a Python that has been taken down
        abort()

def work():
    time.sleep(0.2)
    sys.stdout.write("thread, ")

kept = Aborts()
atexit.register(lambda: sys.stdout.write("exit function"))
launcher_main._run = lambda argv, server: threading.Thread(target=work).start() or LauncherEnd(int(sys.argv.pop()))
"""


def end(last: str, code: int, *, script: str = SCRIPT, redirection: str = "") -> subprocess.CompletedProcess[str]:
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh"]
    command = [*shell, sys.executable, "-c", script + last, str(code)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("redirection", "out"), [("", "thread, exit function"), ("1>&-", ""), ("1>/dev/full", "")])
def test_launcher_end_flushes_output_waits_for_threads_and_exit_functions_and_keeps_its_code(
    redirection: str, out: str
) -> None:
    script = SCRIPT if out else SCRIPT.replace("sys.stdout.write", "(sys.stdout or sys.stderr).write")
    ended = end("sys.exit(launcher_main.main())", 2, script=script, redirection=redirection)
    assert (ended.returncode, ended.stdout) == (2, out)
    assert ended.stderr == "" or not out


def test_process_that_only_calls_main_keeps_its_own_end() -> None:
    ended = end("print(launcher_main.main([]), flush=True); sys.exit(5)", 3)
    assert ended.stdout.startswith("3\n")
    assert ended.returncode == -signal.SIGABRT


CALLS = """
import signal, sys, threading
from unittest import mock
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from megatron_ft.launcher.main import main
numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGCONT, signal.SIGUSR1)
def handler(*_): pass
for number in numbers: signal.signal(number, handler)
options, script = sys.argv[1:-1], sys.argv[-1]
codes = []
restarts = ["--max-restarts=1", "--ft-forward-signals=SIGUSR1"]
thread = threading.Thread(target=lambda: codes.append(main([*options, *restarts, script, "restarts"])))
thread.start()
thread.join()
print("returned", codes, all(signal.getsignal(number) is handler for number in numbers))
try:
    main([*options, script, "fails"])
except ChildFailedError as error:
    print("raised", sorted(error.failures))
with mock.patch.object(LocalElasticAgent, "run", side_effect=KeyError("planted")):
    try:
        main([*options, script, "well"])
    except KeyError as error:
        print("raised", error)
try:
    main(["--no-python", "--module", *options, script])
except ValueError as error:
    print("raised", error)
"""


def test_job_returns_or_raises_to_a_caller_of_main_as_under_torchrun(tmp_path: Path) -> None:
    """A launcher in another thread than the main one takes no signal."""
    script = tmp_path / "script.py"
    fails = "sys.argv[1] == 'fails' or sys.argv[1] == 'restarts' and os.environ['FT_CYCLE'] == '0'"
    script.write_text(f"import os, sys\nif {fails}:\n    raise OSError\n")
    words = [sys.executable, "-c", CALLS, f"--ft-log-dir={tmp_path}", "--nproc-per-node=2", str(script)]
    ended = subprocess.run(words, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=120)
    assert ended.stdout.splitlines() == [
        "returned [0] True",
        "raised [0, 1]",
        "raised 'planted'",
        "raised --no-python and --module (-m) exclude each other",
    ], ended.stderr


FAILS = """
import sys, time
from megatron_ft.launcher.rules.agent import AgentPhase
from megatron_ft.launcher import main as launcher_main
from megatron_ft.launcher.cycle.fault_tolerant_agent import FaultTolerantAgent

def hear(agent, event, real=FaultTolerantAgent._hear):
    real(agent, event)
    if agent._machine.phase is AgentPhase.RUNNING:
        raise KeyError("planted")

FaultTolerantAgent._hear = hear
kept = launcher_main._leave
launcher_main._leave = lambda code: print("in order", flush=True) or kept(code)
sys.exit(launcher_main.main())
"""


def test_an_unforeseen_error_is_one_line(tmp_path: Path) -> None:
    script, logs = tmp_path / "script.py", tmp_path / "logs"
    script.write_text("import time; time.sleep(60)")
    words = [sys.executable, "-c", FAILS, f"--ft-log-dir={logs}", "--ft-preload=none", str(script)]
    ended = subprocess.run(words, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "in order\n")
    assert "Traceback" not in ended.stderr
    (log,) = logs.glob("launcher-*.jsonl")
    failed = "the launcher failed: KeyError: 'planted'"
    assert f"[ft_launcher] {failed} (its traceback is in {log})" in ended.stderr.splitlines()
    records = [json.loads(each) for each in log.read_text().splitlines()]
    assert ["in hear" in each["traceback"] for each in records if each["ev"] == "launcher_failed"] == [True]
    (life,) = json.loads((logs / "result.json").read_text())["lives"]
    assert (life["outcome"], life["exit_code"], life["cause"]) == ("failed", 1, failed)
