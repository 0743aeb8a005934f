"""One chaos run: the job, started as often as its plan has it, and what is done to its node from outside."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.chaos import job
from tests.chaos.check import Launch, Seen
from tests.chaos.plan import EVAL_INTERVAL, ITERATIONS, LAYOUTS, RANKS, SAVE_INTERVAL, Event, Outcome, Plan
from tests.support import forked_launcher
from tests.support.launching import ROOT, clean_environment, command_line, marked

__all__ = ["LAUNCH_S", "LEFT_S", "MARK", "MEGATRON", "TIMEOUTS", "Run", "launcher_records", "read_records", "training"]

MEGATRON = "tests.support.megatron_on_cpu"
"""A module that imports Megatron."""
MARK = "FT_CHAOS_RUN"
LAUNCH_S = 150.0
"""No launch takes longer, on a loaded machine, too; the timeouts that hangs wait for are in it."""
LEFT_S = 10.0
_SUSPENDED_S = (0.2, 4.0)
TIMEOUTS = (
    "--ft-rank-section-timeouts=setup:20,step:5,checkpointing:20",
    "--ft-rank-out-of-section-timeout=10",
    "--ft-startup-timeout=25",
    "--ft-exit-timeout=8",
)
_OF_OTHERS = ("torchinductor_", "pymp-")
"""What torch, and a killed process that used multiprocessing, leave in the temporary directory."""
_SMALL_DISK_BYTES = 64 << 20


class Run:
    """Everything of it is under one short directory of its own, which goes with it."""

    def __init__(
        self,
        plan: Plan,
        *,
        clock_library: Path | None,
        environment: Mapping[str, str] | None = None,
        forks: bool = False,
    ) -> None:
        """``forks``: launchers are forks of a process that has imported Megatron, where that is possible."""
        self.plan = plan
        self.directory = Path(tempfile.mkdtemp(prefix="ftc"))
        self.mark = f"{MARK}={self.directory.name}"
        self._environment = environment or {}
        self._forks = forks
        self._clock_library = clock_library
        self._chance = random.Random(plan.seed)
        self._launches: list[Launch] = []
        self._process: subprocess.Popen[bytes] | forked_launcher.ForkedLauncher | None = None
        self._ended_cycles = 0
        """Of the launch that runs."""
        self._shared_memory = set(os.listdir("/dev/shm"))

    def __enter__(self) -> Run:
        for name in ("tmp", "save"):
            (self.directory / name).mkdir()
        events = [{**asdict(event), "seed": self.plan.seed} for event in self.plan.events]
        (self.directory / "plan.json").write_text(json.dumps(events))
        (self.directory / "trace.jsonl").touch()
        (self.directory / "clock").write_bytes(struct.pack("q", 0))
        self._orders = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.bind(str(self.directory / "orders"))
        self._orders.listen(8)
        if self.plan.needs_small_disk:
            size = f"size={_SMALL_DISK_BYTES}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", str(self.directory / "save")], check=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._kill_all()
        self._orders.close()
        if self.plan.needs_small_disk:
            subprocess.run(["umount", "--lazy", str(self.directory / "save")], check=True)

    def perform(self, undisturbed: str) -> Seen:
        """All its launches, and what was seen of them."""
        leave = {(e.launch, number) for number, e in enumerate(self.plan.events) if e.outcome == Outcome.LEAVES}
        for number in range(1 + len(leave)):
            self._launches.append(self._launch())
            trace = read_records(self.directory / "trace.jsonl")
            if not any((number, record["number"]) in leave for record in trace if record["what"] == "fault"):
                break  # it wasn't asked to
            self._wait_gone()
        return Seen(
            plan=self.plan,
            launches=self._launches,
            trace=list(read_records(self.directory / "trace.jsonl")),
            weights=self._weights(),
            undisturbed=undisturbed,
            left=self.left(),
        )

    def environment(self, launch: int) -> dict[str, str]:
        """Of a launcher of that number."""
        name, _, value = self.mark.partition("=")
        own = {"TMPDIR": str(self.directory / "tmp"), name: value, job.LAUNCH: str(launch)}
        return {**_base_environment(), **own}

    def output(self) -> str:
        """Of all launchers."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.directory.glob("launch-*.err")))

    def remove(self) -> None:
        """Its directory."""
        shutil.rmtree(self.directory)

    # the launch

    def _launch(self) -> Launch:
        number, self._ended_cycles = len(self._launches), 0
        logs, output = self.directory / f"logs-{number}", self.directory / f"launch-{number}.err"
        preloaded = {"FT_CHAOS_CLOCK": str(self.directory / "clock"), "LD_PRELOAD": str(self._clock_library)}
        environment = {
            **self.environment(number),
            **(preloaded if self._clock_library is not None and self.plan.steps_clock else {}),
            **self._environment,
        }
        command, forked = self._command(logs), None
        with output.open("wb") as stream:
            if self._forks:
                streams = (stream.fileno(), stream.fileno())
                forked = forked_launcher.start(
                    *(command, [MEGATRON]),
                    env=environment,
                    base=_base_environment(),
                    mark=self.mark,
                    cwd=self.directory,
                    output=streams,
                )
            self._process = forked or subprocess.Popen(
                command,
                cwd=self.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        end = time.monotonic() + LAUNCH_S
        while self._process.poll() is None and time.monotonic() < end:
            if select.select([self._orders], [], [], 0.02)[0]:
                self._obey()
            self._look_at(output.read_text(errors="replace"))
        code = self._process.poll()
        if code is None:
            self._kill_all()
        return Launch(number=number, code=code, records=launcher_records(logs))

    def _command(self, logs: Path) -> list[str]:
        preload = {"megatron": [f"--ft-preload={MEGATRON}"], "default": [], "none": ["--ft-preload=none"]}
        command = [sys.executable, "-m", "megatron_ft.launcher", f"--nproc-per-node={RANKS}", "--max-restarts=10"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--ft-log-dir={logs}"]
        command += [*TIMEOUTS, *preload[self.plan.preload]]
        return [*command, *training(self.plan, self.directory)]

    def _look_at(self, output: str) -> None:
        """Whether a cycle has ended."""
        ended = len(re.findall(r"^\[ft_launcher\] cycle \d+ ended: ", output, re.MULTILINE))
        if ended == self._ended_cycles:
            return
        self._ended_cycles = ended
        self._free_disk()
        for number, event in enumerate(self.plan.events):
            if (event.phase, event.launch, event.cycle) == ("rendezvous", len(self._launches), ended):
                time.sleep(self._chance.uniform(0.0, 0.1))
                self._note(number, event)
                self._do(event)

    # the faults of the node

    def _obey(self) -> None:
        connection, _ = self._orders.accept()
        with connection, contextlib.suppress(OSError, ValueError):  # who asked may be gone already
            order = json.loads(connection.recv(4096))
            if order["what"] == "over":
                self._free_disk()
            else:
                self._do(self.plan.events[order["number"]])
            connection.send(b"done")

    def _do(self, event: Event) -> None:
        assert self._process is not None
        match event.fault:
            case "monitor_killed" | "monitor_stopped":
                self._signal(self._monitor(event.rank), event.fault)
            case "server_killed" | "server_stopped":
                for pid in [stat.pid for stat in marked(self.mark) if stat.comm == "ft_fork_server"]:
                    self._signal(pid, event.fault)
            case "launcher_killed" | "launcher_term" | "launcher_int":
                numbers = {"killed": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}
                self._process.send_signal(numbers[event.fault.removeprefix("launcher_")])
            case "node_suspended":
                self._suspend()
            case "clock_stepped":
                step = self._chance.choice((-86_400, -60, 60, 86_400))
                with (self.directory / "clock").open("r+b") as file:
                    file.write(struct.pack("q", step))
            case "run_dir_removed":
                for path in (self.directory / "tmp").glob("megatron_ft-*"):
                    shutil.rmtree(path)
            case "disk_full" | "state_disk_full":
                self._fill_disk()
            case _:
                raise AssertionError(event.fault)

    def _signal(self, pid: int, fault: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if fault.endswith("stopped") else signal.SIGKILL)

    def _monitor(self, rank: int) -> int:
        for stat in marked(self.mark):
            words = command_line(stat.pid)
            if "--listen-fd" in words and words[words.index("--local-rank") + 1] == str(rank):
                return stat.pid
        raise AssertionError(f"rank {rank} has no monitor")

    def _suspend(self) -> None:
        """As a hypervisor does: nobody is told, and time goes on."""
        found = [stat.pid for stat in marked(self.mark)]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if number == signal.SIGSTOP:
                time.sleep(self._chance.uniform(*_SUSPENDED_S))

    def _fill_disk(self) -> None:
        with (self.directory / "save" / ".filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def _free_disk(self) -> None:
        (self.directory / "save" / ".filler").unlink(missing_ok=True)

    # the end

    def _note(self, number: int, event: Event) -> None:
        told = {"t": time.monotonic_ns(), "what": "fault", "number": number, "rank": event.rank}
        with (self.directory / "trace.jsonl").open("a") as file:
            file.write(json.dumps({**told, "cycle": event.cycle, "launch": event.launch}) + "\n")

    def _weights(self) -> str | None:
        path = self.directory / "weights"
        return path.read_text().strip() if path.exists() else None

    def _wait_gone(self) -> None:
        end = time.monotonic() + LEFT_S
        while marked(self.mark) and time.monotonic() < end:
            time.sleep(0.02)

    def left(self) -> list[str]:
        """What is still there some seconds after the end."""
        end = time.monotonic() + LEFT_S
        while True:
            left = [f"process {stat.pid} {' '.join(command_line(stat.pid))}" for stat in marked(self.mark)]
            names = [path.name for path in (self.directory / "tmp").iterdir()]
            left += [f"file {name}" for name in names if not name.startswith(_OF_OTHERS)]
            left += [f"shared memory {name}" for name in set(os.listdir("/dev/shm")) - self._shared_memory]
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.05)

    def _kill_all(self) -> None:
        while found := marked(self.mark):
            for stat in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stat.pid, signal.SIGKILL)
            time.sleep(0.01)
        if self._process is not None:
            self._process.wait()


def training(plan: Plan, directory: Path) -> list[str]:
    """The script and its arguments."""
    command = [str(Path(job.__file__)), str(directory), f"--save={directory / 'save'}"]
    command += [f"--hash-file={directory / 'weights'}", f"--train-iters={ITERATIONS}"]
    command += [f"--save-interval={SAVE_INTERVAL}", f"--eval-interval={EVAL_INTERVAL}", "--eval-iters=1"]
    return [*command, *LAYOUTS[plan.layout], *(["--calc-ft-timeouts"] if plan.learns else [])]


def _base_environment() -> dict[str, str]:
    return {**clean_environment(), "PYTHONPATH": str(ROOT)}


def launcher_records(logs: Path) -> list[dict[str, Any]]:
    """Of the launchers that wrote their event logs there."""
    return [record for path in logs.glob("launcher-*.jsonl") for record in read_records(path)]


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Of a file of JSON lines."""
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # cut off, by a kill
            yield json.loads(line)
