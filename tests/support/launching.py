"""``ft_launcher`` as a process under test: started with small scripts, watched, and nothing of it left behind.

Everything a launch starts inherits a unique mark in its environment; that is how it is found again in /proc,
whatever it did to its session, group or parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.link.linux.processes import ProcessStat, all_processes, carries
from tests import ROOT
from tests.support import forked_launcher

MARK_NAME = "FT_TEST_MARK"
START_S = 60.0
"""Bound for everything that includes a start of a launcher on a loaded machine."""
GONE_S = 10.0
"""So long after the launcher's end nothing of the job is there any more: a coordinator may stay 5 s to tell of it."""

SLEEPS = (sys.executable, "-S", "-c", "import time; time.sleep(600)")

END_IS_TOO_LATE = (3, 12) <= sys.version_info < (3, 12, 3)
"""These versions of Python refuse to fork at the end of a script: where that is the first point, ranks start anew."""

PRELUDE = """
import os, signal, sys, time
RANK, CYCLE = int(os.environ["RANK"]), int(os.environ["FT_CYCLE"])
def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n"); sys.stdout.flush()
def forever():
    while True:
        time.sleep(1)
"""
QUICK_END = "import ctypes; ctypes.CDLL(None).on_exit(ctypes.CDLL(None)._exit, None)"
"""For a script's first line: when Python has been taken down, the process ends with its exit code at once.

It is a fork of a process that had imported torch, and to take torch's tables down in C++, which it doesn't use, is most
of the processor time that it would cost.
"""


@dataclass(frozen=True)
class Finished:
    """A launcher that has ended."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        """The launcher's own lines, without the prefix, and without time and node where there may be several."""
        found = re.findall(r"^\[ft_launcher\] (?:\d\d:\d\d:\d\d \S+: )?(.*)$", self.err, re.MULTILINE)
        often = ("logs: ", "configuration: ", "ranks share ")
        return [line for line in found if not line.startswith(often)]


class Launched:
    """A launcher that runs. Its output goes to files, so that nobody waits for a reader."""

    def __init__(
        self,
        directory: Path,
        arguments: Sequence[str],
        env: Mapping[str, str],
        prefix: Sequence[str] = (),
        *,
        program: Sequence[str] = (),
        fresh: bool = False,
        host: int | None = None,
    ) -> None:
        """``program``: what is started in the launcher's place. ``fresh``: a new interpreter.

        ``host``: a process on the host (``netns.Hosts``) that a fork is to run on.
        """
        self.directory = directory
        self.mark = f"{MARK_NAME}={os.urandom(8).hex()}"
        # sockets need a short path, and pytest's directories are long
        self.temp_dir = tempfile.mkdtemp(prefix="ft")
        self.log_dir = directory / "ft_logs"
        self._out, self._err = directory / "launcher.out", directory / "launcher.err"
        name, _, value = self.mark.partition("=")
        ours = [sys.executable, "-m", "megatron_ft.launcher", "--ft-log-dir", str(self.log_dir)]
        command = [*prefix, *(program or ours), *arguments]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        base = {**clean_environment(), "PYTHONPATH": path}
        # each launcher prints every line, so that a test may wait for any of them
        environment = {**base, "TMPDIR": self.temp_dir, name: value, "MEGATRON_FT_SAYS_ALL": "1", **env}
        self._started = time.monotonic()
        self.process: subprocess.Popen[bytes] | forked_launcher.ForkedLauncher
        with self._out.open("w") as out, self._err.open("w") as err:
            forked = None
            if not fresh:
                request = {"argv": command, "env": environment, "mark": self.mark, "cwd": str(directory), "host": host}
                forked = forked_launcher.start(request, base=base, output=(out.fileno(), err.fileno()))
            assert host is None or forked, "a new interpreter gets there by a prefix"
            self.process = forked or subprocess.Popen(
                command,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        """The ranks' output so far."""
        return self._out.read_text()

    @property
    def err(self) -> str:
        """What the launcher (and the ranks) wrote to standard error so far."""
        return self._err.read_text()

    def wait(self, timeout_s: float = START_S) -> Finished:
        """Until it has ended."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the launcher didn't end in {timeout_s:g} s:\n{self.out}\n{self.err}")
        return Finished(code, self.out, self.err, time.monotonic() - self._started)

    def wait_for(self, pattern: str, *, count: int = 1, timeout_s: float = START_S) -> list[str]:
        """Until the output has ``count`` matches of ``pattern``; returns them (the group, if it has one)."""
        wait_until(
            lambda: (
                len(re.findall(pattern, self.out + self.err, re.MULTILINE)) >= count or self.process.poll() is not None
            ),
            timeout_s,
        )
        found = re.findall(pattern, self.out + self.err, re.MULTILINE)
        assert len(found) >= count, f"{pattern!r} {len(found)} times:\n{self.out}\n{self.err}"
        return found

    def signal(self, number: int) -> None:
        """Signal the launcher alone."""
        self.process.send_signal(number)

    def alive(self) -> list[ProcessStat]:
        """Processes of this launch that live, the launcher itself included."""
        return marked(self.mark)

    def monitor_pids(self) -> dict[int, int]:
        """Process ids of the monitors by local rank."""
        found = {}
        for stat in self.alive():
            words = command_line(stat.pid)
            if "--listen-fd" in words:
                found[int(words[words.index("--local-rank") + 1])] = stat.pid
        return found

    def events(self, name: str, role: str = "launcher") -> list[dict[str, Any]]:
        """Records of that name that processes of that role have made, oldest first.

        The launcher logs what its monitors report; of verdicts, its own have a text.
        """
        roles = ("launcher", "monitor") if role == "monitor" else (role,)
        paths = (path for each in roles for path in self.log_dir.glob(f"{each}-*.jsonl"))
        records = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
        if name == "verdict":
            records = [each for each in records if (each.get("text") is None) == (role == "monitor")]
        return sorted((r for r in records if r["ev"] == name), key=lambda record: record["t"])

    def ends(self) -> list[tuple[int | None, str | None, str, int | None]]:
        """Of each cycle that ended here: the rank and the kind of its cause, what follows, and restarts left."""
        events = [(event, event["cause"] or {}) for event in self.events("cycle_ended")]
        return [(why.get("rank"), why.get("kind"), e["action"], e["restarts_left"]) for e, why in events]

    def exits(self, cycle: int = 0) -> dict[int, tuple[int, bool]]:
        """Of each rank of this node in that cycle: its exit code, and whether we have ended it."""
        events = [event for event in self.events("rank_exited") if event["cycle"] == cycle]
        return {event["rank"]: (event["exitcode"], event["by_us"]) for event in events}

    def assert_nothing_left(self) -> None:
        """Within the promised time no process, socket or run directory is left."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.alive() and not self._left_files(), GONE_S)
        left = [(stat.pid, stat.comm, command_line(stat.pid)) for stat in self.alive()]
        assert not left, f"processes are left: {left}"
        assert not self._left_files(), f"files are left in TMPDIR: {self._left_files()}"

    def _left_files(self) -> list[str]:
        """What is in the launch's temporary directory, but for the cache that torch's compiler shares among processes.

        megatron-core 0.17 makes that directory when it is imported.
        """
        return [name for name in os.listdir(self.temp_dir) if not name.startswith("torchinductor_")]

    def destroy(self) -> None:
        """End everything, for a test that failed."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not _kill(self.alive()), GONE_S)
        self.process.wait()
        shutil.rmtree(self.temp_dir, ignore_errors=True)


class Launcher:
    """Makes launches in one directory; ``run`` waits for the end and checks that nothing is left."""

    def __init__(self, directory: Path, *, fresh: bool = False, program: Sequence[str] = ()) -> None:
        self.directory = directory
        self.program = program
        self.fresh = fresh
        self.launches: list[Launched] = []

    def start(
        self,
        script: str | Sequence[str],
        *options: str,
        env: Mapping[str, str] | None = None,
        script_args: Sequence[str] = (),
        prefix: Sequence[str] = (),
        host: int | None = None,
    ) -> Launched:
        """Start one. ``script`` is the text of a Python script, after ``PRELUDE``, or a command's words.

        ``prefix`` are the words of a command that becomes the launcher, somewhere else; ``host`` is a process that is
        where a fork is to be.
        """
        directory = self.directory / str(len(self.launches))
        directory.mkdir()
        if isinstance(script, str):
            path = directory / "script.py"
            # torch first, where it is used: the line after it ends what ranks share
            first = ["import torch"] if re.search(r"^ *(import|from) torch", script, re.MULTILINE) else []
            path.write_text("; ".join(first + ([] if self.fresh else [QUICK_END])) + PRELUDE + script)
            script = [str(path)]
        arguments = [*options, *script, *script_args]
        how = {"program": self.program, "fresh": self.fresh, "host": host}
        launched = Launched(directory, arguments, env or {}, prefix, **how)
        self.launches.append(launched)
        return launched

    def run(self, script: str | Sequence[str], *options: str, **more: Any) -> Finished:
        """Start one, wait for its end, and check that nothing is left."""
        launched = self.start(script, *options, **more)
        finished = launched.wait()
        launched.assert_nothing_left()
        return finished


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """A factory of launches; at the end of the test each must be gone with everything it started."""
    with gone_at_the_end(Launcher(tmp_path)) as factory:
        yield factory


@pytest.fixture
def fresh_launcher(tmp_path: Path) -> Iterator[Launcher]:
    """The same, for tests of how a launcher starts, and of what its ranks inherit: each is a new interpreter."""
    with gone_at_the_end(Launcher(tmp_path, fresh=True)) as factory:
        yield factory


@pytest.fixture
def start_process() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """``subprocess.Popen`` (of a process that sleeps) whose processes are killed at the end of the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(command: Sequence[str] = SLEEPS, **options: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(command, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
    for process in started:
        process.communicate()


@contextlib.contextmanager
def gone_at_the_end(factory: Launcher) -> Iterator[Launcher]:
    """Yield the factory; afterwards each of its launches must be gone with everything it started."""
    try:
        yield factory
        for launched in factory.launches:
            if launched.process.poll() is not None:
                launched.assert_nothing_left()
    finally:
        for launched in factory.launches:
            launched.destroy()


def clean_environment() -> dict[str, str]:
    """Ours, without what would make a launcher under test take itself for a rank."""
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH"}
    names.add("PYTORCH_NVML_BASED_CUDA_CHECK")  # Lightning sets it in the process that imports it: in that of the tests
    prefixes = ("FT_", "FAULT_TOL_", "SLURM_", "PET_", "TORCHELASTIC_", "TORCH_ELASTIC_", "GROUP_", "ROLE_")
    kept = {k: v for k, v in os.environ.items() if k not in names and not k.startswith(prefixes)}
    # one thread: else torchrun warns, and small machines are busy with nothing
    return {**kept, "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    """A port of this machine at which nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def marked(mark: str) -> list[ProcessStat]:
    """Living processes that were started with ``mark`` in their environment."""
    return [stat for stat in all_processes() if stat.state not in "ZX" and carries(stat.pid, mark.encode())]


def open_files(pid: int) -> list[str]:
    """What the descriptors of a process lead to."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just been closed
            found.append(os.readlink(entry))
    return found


def command_line(pid: int) -> list[str]:
    """The words of a process's command line; empty if it is gone."""
    try:
        # of a fork, zeros follow
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for a condition, and fail when it doesn't come."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.01
    while not condition():
        assert time.monotonic() < deadline, f"the condition didn't come in {timeout_s:g} s"
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, 0.05)  # most conditions read files of many processes


def _kill(stats: list[ProcessStat]) -> bool:
    for stat in stats:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stat.pid, signal.SIGKILL)
    return bool(stats)
