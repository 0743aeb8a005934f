"""Each fault, for real, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.core.fault_plan import FAULT_TYPES, IN_LOOP_TYPES
from megatron_ft.rank.faults import acts
from megatron_ft.rank.faults.acts import InjectedFault
from tests import ROOT
from tests.support import more_faults

BOUND_S = 100.0
ENDING = {"rank_killed", "segfault", "exit", "exception", "sigterm"}
HANGING = {"rank_hung", "sleep", "spin", "gil"}
ELSEWHERE = {"slow": "test_fault_injector.py", "stuck_collective": "tests/e2e/test_simulated_faults.py"}

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


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def wait_for_state(process: subprocess.Popen[str], state: str) -> None:
    deadline = time.monotonic() + BOUND_S
    while process_state(process.pid) != state:
        assert time.monotonic() < deadline, f"not in state {state} but {process_state(process.pid)}"
        time.sleep(0.005)


def test_every_type_is_tested() -> None:
    assert ENDING | HANGING | set(ELSEWHERE) | {"disk_full"} == set(FAULT_TYPES) | set(more_faults.TYPES)
    assert set(IN_LOOP_TYPES) < set(FAULT_TYPES)
    with pytest.raises(InjectedFault):
        acts.inject("exception")


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("rank_killed", -signal.SIGKILL),
        ("segfault", -signal.SIGSEGV),
        ("sigterm", -signal.SIGTERM),
        ("exit", 3),
        ("exception", 1),
    ],
)
def test_faults_that_end_the_process(kind: str, code: int, tmp_path: Path) -> None:
    with victim(kind, tmp_path) as process:
        out, err = process.communicate(timeout=BOUND_S)
    assert process.returncode == code
    assert out == "alive\n", "what was printed before must not be lost"
    assert "FT: SIMULATED FAULT: rank 0 " in err
    assert ("InjectedFault" in err) is (kind == "exception")
    assert list(tmp_path.iterdir()) == [], "a core dump"


def test_sigterm_can_be_handled(tmp_path: Path) -> None:
    script = "import signal; signal.signal(signal.SIGTERM, lambda *_: print('asked to end', flush=True))" + VICTIM
    with victim("sigterm", tmp_path, script) as process:
        out, _ = process.communicate(timeout=BOUND_S)
    assert out == "alive\nasked to end\nsurvived\n"
    assert process.returncode == 0


def test_rank_hung_stops_the_process(tmp_path: Path) -> None:
    with victim("rank_hung", tmp_path) as process:
        wait_for_state(process, "T")
        process.send_signal(signal.SIGCONT)
        out, _ = process.communicate(timeout=BOUND_S)
    assert out == "alive\nsurvived\n"


def test_sleep_sleeps_and_outlives_a_continue(tmp_path: Path) -> None:
    with victim("sleep", tmp_path) as process:
        assert process.stderr is not None
        assert "sleeps for ever" in process.stderr.readline()
        wait_for_state(process, "S")
        process.send_signal(signal.SIGCONT)
        wait_for_state(process, "S")
        assert process.poll() is None


def test_spin_fault_consumes_cpu_and_never_ends(tmp_path: Path) -> None:
    with victim("spin", tmp_path) as process:
        assert process.stderr is not None
        assert "spins for ever" in process.stderr.readline()
        begin, deadline = cpu_ticks(process.pid), time.monotonic() + BOUND_S
        while cpu_ticks(process.pid) < begin + 10:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert process.poll() is None


TICKING = """
import os, signal, threading, time
def tick():
    while True:
        os.write(1, b".")
        time.sleep(0.005)
signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
threading.Thread(target=tick, daemon=True).start()
"""


def test_gil_stops_every_thread_and_no_signal_handler_runs(tmp_path: Path) -> None:
    with victim("gil", tmp_path, TICKING + VICTIM) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "holds the GIL" in process.stderr.readline()
        os.set_blocking(process.stdout.fileno(), False)
        quiet_since = time.monotonic()
        deadline = quiet_since + BOUND_S
        while time.monotonic() - quiet_since < 0.3:  # a sleeping main thread would let sixty ticks through
            assert time.monotonic() < deadline, "the other thread still runs"
            with contextlib.suppress(BlockingIOError):
                if os.read(process.stdout.fileno(), 4096):
                    quiet_since = time.monotonic()
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        begin = cpu_ticks(process.pid)
        wait_for_state(process, "S")
        assert cpu_ticks(process.pid) <= begin + 1, "it waits, it doesn't spin"


FULL_DISK = """
import errno, os, pathlib, sys, tempfile
kind, torch_too = sys.argv[1], "torch" in sys.argv[1]
if torch_too:
    import torch
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
if torch_too:
    for path in ("save/model.pt", pathlib.Path("save/model.pt")):
        try:
            torch.save({"weights": torch.ones(100_000)}, path)
        except RuntimeError as error:
            print("torch:", str(error).splitlines()[0])
        else:
            raise AssertionError("torch.save went through")
    torch.save({}, "saved/model.pt")
assert sorted(os.listdir("save")) == ["kept", "old", "read"], os.listdir("save")
print("all as it should be")
"""


@pytest.mark.parametrize("kind", ["plain", "torch"])
def test_disk_full_is_where_the_checkpoints_go(kind: str, tmp_path: Path) -> None:
    with victim(kind, tmp_path, FULL_DISK) as process:
        out, err = process.communicate(timeout=BOUND_S)
    assert process.returncode == 0, err
    assert out.endswith("all as it should be\n")
    assert out.count("torch:") == (2 if kind == "torch" else 0)
