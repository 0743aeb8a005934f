"""``ft_launcher`` as process 1 of a container: orphans of everybody are its children, and signals need a handler."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time

import pytest

from megatron_ft.link.linux.processes import all_processes
from megatron_ft.link.process_tree import Orphans
from tests.support.launching import Launched, Launcher, command_line, wait_until

pytestmark = pytest.mark.waits

CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
ORPHANS = """
asked = []
def obey(number, frame):
    asked.append(signal.Signals(number).name)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, obey)
say("ready", RANK)
count = 0
while not asked:
    if os.path.exists("quiet"):
        time.sleep(0.05)
        continue
    for leave in (lambda: None, os.setpgrp, os.setsid):
        if os.fork() == 0:
            if os.fork() == 0:
                leave()
                time.sleep(0.02)
            os._exit(0)
        os.wait()
        count += 1
    say("orphans", count)
    time.sleep(0.3)
say("obeyed", RANK, *asked)
"""


@pytest.fixture(autouse=True)
def container() -> None:
    """Skips where there can be none."""
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        pytest.skip("unshare and nsenter are needed")
    if subprocess.run([*CONTAINER, "true"], capture_output=True).returncode != 0:
        pytest.skip("process namespaces can't be made here")


def process_one(launched: Launched) -> int:
    """The launcher, by its number out here."""
    found: list[int] = []

    def is_there() -> bool:
        found[:] = [stat.pid for stat in all_processes() if stat.parent == launched.process.pid]
        return bool(found) and "megatron_ft.launcher" in command_line(found[0])

    wait_until(is_there, 60)
    return found[0]


def zombies(parent: int) -> set[int]:
    return {stat.pid for stat in all_processes() if stat.parent == parent and stat.state == "Z"}


def test_orphans_are_reaped_and_the_end_is_in_order(launcher: Launcher) -> None:
    launched = launcher.start(ORPHANS, "--nproc-per-node=2", "--max-restarts=1", prefix=CONTAINER)
    launched.wait_for("^orphans 9$", count=2)
    one = process_one(launched)
    # what a shell that was let in leaves behind is in the session of nobody, as process 1 itself
    enter = ["nsenter", "--target", str(one), "--pid", "--mount"]
    subprocess.run([*enter, "sh", "-c", "for i in 1 2 3; do sleep 0.1 & done"], check=True)
    wait_until(lambda: len(zombies(one)) >= 3, 20)
    entered = zombies(one)
    wait_until(lambda: not entered & zombies(one), Orphans.LIBRARY_S + 30)
    # each is there for a moment; they don't become more
    wait_until(lambda: not zombies(one), 30)
    # orphans are reaped also when nothing else ends
    (launched.directory / "quiet").touch()
    time.sleep(1)
    subprocess.run([*enter, "sh", "-c", "sleep 0.1 &"], check=True)
    wait_until(lambda: bool(zombies(one)), 20)
    wait_until(lambda: not zombies(one), Orphans.LIBRARY_S + 15)
    os.kill(one, signal.SIGTERM)
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert sorted(re.findall(r"^obeyed .*", finished.out, re.MULTILINE)) == [
        f"obeyed {rank} SIGTERM" for rank in (0, 1)
    ]
    launched.assert_nothing_left()


def test_sigterm_before_anything_runs_is_not_lost(launcher: Launcher) -> None:
    launched = launcher.start("forever()", prefix=CONTAINER)
    one = process_one(launched)
    while launched.process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGTERM)
        time.sleep(0.02)
    finished = launched.wait()
    assert finished.code == 128 + signal.SIGTERM
    assert finished.err == ""
    launched.assert_nothing_left()
