"""The last moments of ``ft_launcher``, when its job is over: whatever happens in them, its exit code is the job's."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from megatron_ft.launcher.base.terminal import say
from tests import ROOT

SCRIPT = """
import atexit, os, sys, threading, time
from megatron_ft.launcher import main as launcher_main

class Aborts:
    def __del__(self, abort=os.abort):  # as C++ does, when a thread comes back to a Python that has been taken down
        abort()

def work():
    time.sleep(0.2)
    sys.stdout.write("thread, ")

kept = Aborts()
atexit.register(lambda: sys.stdout.write("exit function"))
launcher_main._run = lambda argv, server: threading.Thread(target=work).start() or int(sys.argv.pop())
"""


def end(last: str, code: int, *, script: str = SCRIPT, redirection: str = "") -> subprocess.CompletedProcess[str]:
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh"]
    command = [*shell, sys.executable, "-c", script + last, str(code)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("code", [0, 1, 2])
def test_all_is_flushed_and_waited_for_and_nothing_taken_down(code: int) -> None:
    ended = end("sys.exit(launcher_main.main())", code)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "thread, exit function", "")


def test_a_process_that_merely_calls_it_goes_its_own_way() -> None:
    ended = end("print(launcher_main.main([]), flush=True); sys.exit(5)", 3)
    assert ended.stdout.startswith("3\n")
    assert ended.returncode == -signal.SIGABRT


@pytest.mark.parametrize("closed", ["1>&-", "1>/dev/full"])
def test_output_that_nobody_takes(closed: str) -> None:
    script = SCRIPT.replace("sys.stdout.write", "(sys.stdout or sys.stderr).write")
    assert end("sys.exit(launcher_main.main())", 0, script=script, redirection=closed).returncode == 0


def test_a_line_of_the_launcher_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever a rank, another node or a file's name brought into it."""
    say("rank 1 raised ValueError: \x1b[2J\x07\udc80\n[ft_launcher] all is well\r")
    assert capsys.readouterr().err == (
        "[ft_launcher] rank 1 raised ValueError: \\x1b[2J\\x07\\udc80 [ft_launcher] all is well \n"
    )
