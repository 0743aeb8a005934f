"""Faults in a process of their own: what is printed before is kept, and a full disk is full for everybody."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

BOUND_S = 100.0
VICTIM = """
import sys
from megatron_ft.core.fault_plan import PlannedFault
from megatron_ft.rank.faults.injection import FaultInjector
from tests.support import more_faults
more_faults.install()
fault = PlannedFault(cycle=0, rank=0, iteration=1, type=sys.argv[1])
injector = FaultInjector([fault], rank=0, cycle=0)
injector.on_iteration(0)
print("alive")
injector.on_iteration(1)
print("survived", flush=True)
"""


@contextlib.contextmanager
def victim(kind: str, cwd: Path, script: str = VICTIM) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, kind],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("kind", "code"), [("rank_killed", -signal.SIGKILL), ("exception", 1)])
def test_faults_that_end_the_process(kind: str, code: int, tmp_path: Path) -> None:
    with victim(kind, tmp_path) as process:
        out, err = process.communicate(timeout=BOUND_S)
    assert process.returncode == code
    assert out == "alive\n", "what was printed before must not be lost"
    assert "FT: SIMULATED FAULT: rank 0 " in err
    assert ("InjectedFault" in err) is (kind == "exception")
    assert list(tmp_path.iterdir()) == [], "a core dump"


FULL_DISK = """
import errno, os, pathlib, sys, tempfile
from tests.support import more_faults
os.makedirs("save/old"); os.makedirs("saved")
kept = open("save/kept", "w")
pathlib.Path("save/read").write_text("read me")
more_faults.inject("disk_full", save_dir="save")

def tried(*writes):
    for number, write in enumerate(writes):
        try:
            write()
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
            assert "(simulated)" in str(error), error
        else:
            raise AssertionError(f"write {number} went through")

tried(
    lambda: open("save/new", "w"),
    lambda: open("save/read", "a"),
    lambda: open("save/read", "r+b"),
    lambda: open(b"save/old/new", "xb"),
    lambda: pathlib.Path("save/old/new").write_text("x"),
    lambda: os.open(os.path.abspath("save/new"), os.O_WRONLY | os.O_CREAT),
    lambda: open("saved/../save/new", "w"),
    lambda: tempfile.NamedTemporaryFile(dir="save"),
)
assert pathlib.Path("save/read").read_text() == "read me"
pathlib.Path("saved/fine").write_text("x")
open(kept.fileno(), "w", closefd=False).write("still open")
child = os.fork()
if child == 0:
    try:
        tried(lambda: open("save/new", "w"))
    except BaseException:
        os._exit(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert sorted(os.listdir("save")) == ["kept", "old", "read"], os.listdir("save")
print("all as it should be")
"""


def test_disk_full_is_where_the_checkpoints_go(tmp_path: Path) -> None:
    with victim("plain", tmp_path, FULL_DISK) as process:
        out, err = process.communicate(timeout=BOUND_S)
    assert process.returncode == 0, err
    assert out == "all as it should be\n"
