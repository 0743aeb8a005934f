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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_ft.link.messages.fork_server_messages import FORK_SERVER_NAME
from tests.chaos import job
from tests.chaos.check import Launch, Seen
from tests.chaos.plan import EVAL_INTERVAL, FAULTS, ITERATIONS, LAYOUTS, RANKS, SAVE_INTERVAL, Event, Outcome, Plan
from tests.support.campaigns import launcher_records, read_records
from tests.support.launching import ROOT, clean_environment, command_line, marked

MEGATRON = "tests.support.megatron_on_cpu"
"""A module that imports Megatron."""
LAUNCH_S = 150.0
"""No launch takes longer, on a loaded machine, too; the timeouts that hangs wait for are in it."""
LEFT_S = 10.0
_SUSPENDED_S = (0.2, 4.0)
_COMES_S = 8.0
"""The launcher may wait 5 s before it starts another monitor; a first save may find no keeper yet."""
_SIGNALS = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}
"""By the last word of a fault's name."""
TIMEOUTS = (
    "--ft-rank-section-timeouts=setup:20,step:5,checkpointing:20",
    "--ft-rank-out-of-section-timeout=10",
    "--ft-startup-timeout=25",
    "--ft-exit-timeout=15",
)
_OF_OTHERS = ("torchinductor_", "pymp-")
"""What torch, and a killed process that used multiprocessing, leave in the temporary directory."""
_SMALL_DISK_BYTES = 64 << 20


class Run:
    """Everything of it is under one short directory of its own, which goes with it."""

    def __init__(self, plan: Plan, *, clock_library: Path) -> None:
        self.plan = plan
        self.directory = Path(tempfile.mkdtemp(prefix="ftc"))
        self.mark = f"FT_CHAOS_RUN={self.directory.name}"
        self._clock_library = clock_library
        self._chance = random.Random(plan.seed)
        self._launches: list[Launch] = []
        self.process: subprocess.Popen[bytes] | None = None
        self._ended_cycles = 0
        """Of the launch that runs."""
        self.hits: Counter[int] = Counter()
        """By number of the event: how many processes or files were hit."""
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
        left: list[str] = []
        trace: list[dict[str, Any]] = []
        for number in range(1 + len(leave)):
            self._launches.append(self._launch())
            trace = list(read_records(self.directory / "trace.jsonl"))
            if not any((number, record["number"]) in leave for record in trace if record["what"] == "fault"):
                break  # it wasn't asked to
            left += [f"{what}, after launch {number}" for what in self._wait_gone(self._processes)]
        left += self._wait_gone(self._left)
        told = {record["number"] for record in trace if record["what"] == "fault"}
        ordered = {number for number in told if FAULTS[self.plan.events[number].fault].by != "rank"}
        weights = self.directory / "weights"
        return Seen(
            plan=self.plan,
            launches=self._launches,
            trace=trace,
            weights=weights.read_text().strip() if weights.exists() else None,
            undisturbed=undisturbed,
            left=left,
            missed={number for number in ordered if not self.hits[number]},
        )

    def output(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.directory.glob("launch-*.err")))

    def remove(self) -> None:
        shutil.rmtree(self.directory)

    # the launch

    def _launch(self) -> Launch:
        number, self._ended_cycles = len(self._launches), 0
        logs = self._logs(number)
        name, _, value = self.mark.partition("=")
        environment = {**clean_environment(), "PYTHONPATH": str(ROOT), "TMPDIR": str(self.directory / "tmp")}
        environment |= {name: value, job.LAUNCH: str(number)}
        if self.plan.steps_clock:
            environment |= {"FT_CHAOS_CLOCK": str(self.directory / "clock"), "LD_PRELOAD": str(self._clock_library)}
        with (self.directory / f"launch-{number}.err").open("wb") as stream:
            self.process = subprocess.Popen(
                self._command(logs),
                cwd=self.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        end = time.monotonic() + LAUNCH_S
        while self.process.poll() is None and time.monotonic() < end:
            if select.select([self._orders], [], [], 0.02)[0]:
                self.obey()
            self._look_at(launcher_records(logs))
        code = self.process.poll()
        if code is None:
            self._kill_all()
        return Launch(number=number, code=code, records=launcher_records(logs))

    def _logs(self, launch: int) -> Path:
        return self.directory / f"logs-{launch}"

    def _command(self, logs: Path) -> list[str]:
        preload = {"megatron": [f"--ft-preload={MEGATRON}"], "default": [], "none": ["--ft-preload=none"]}
        command = [sys.executable, "-m", "megatron_ft.launcher", f"--nproc-per-node={RANKS}", "--max-restarts=10"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--ft-log-dir={logs}"]
        command += [*TIMEOUTS, *preload[self.plan.preload]]
        command += [str(Path(job.__file__)), str(self.directory), f"--save={self.directory / 'save'}"]
        command += [f"--hash-file={self.directory / 'weights'}", f"--train-iters={ITERATIONS}"]
        command += [f"--save-interval={SAVE_INTERVAL}", f"--eval-interval={EVAL_INTERVAL}", "--eval-iters=1"]
        command += ["--memory-checkpoint-interval=1"] if self.plan.memory else []
        return [*command, *LAYOUTS[self.plan.layout], *(["--calc-ft-timeouts"] if self.plan.learns else [])]

    def _look_at(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Whether a cycle has ended, other than well."""
        ended = sum(record["ev"] == "cycle_ended" and record["outcome"] != "succeeded" for record in records)
        if ended == self._ended_cycles:
            return
        self._ended_cycles = ended
        self._free_disk()
        for number, event in enumerate(self.plan.events):
            if (event.phase, event.launch, event.cycle) == ("rendezvous", len(self._launches), ended):
                time.sleep(self._chance.uniform(0.0, 0.1))
                self.note(number, event)
                self.hits[number] += self.do(event)

    # the faults of the node

    def obey(self) -> None:
        """Do what a rank asks for, which waits until it is done."""
        connection, _ = self._orders.accept()
        with connection:
            try:
                order = json.loads(connection.recv(4096))
            except (OSError, ValueError):  # it is gone before it has said it
                return
            number = order["number"]
            event = self.plan.events[number]
            if order["what"] == "over":
                self._free_disk()
            elif event.launch == len(self._launches):  # else it waited until the next launcher ran
                self.hits[number] += self.do(event)
            with contextlib.suppress(OSError):  # it may be gone meanwhile
                connection.send(b"done")

    def do(self, event: Event) -> int:
        """How many processes or files it hit."""
        assert self.process is not None
        match event.fault.split("_"):
            case ["monitor", how]:
                return signal_all(self._find(f"--listen-fd .*--local-rank {event.rank}\\b"), _SIGNALS[how])
            case ["server", how]:
                return signal_all(self._servers(), _SIGNALS[how])
            case ["keeper", how]:
                return signal_all(self._find("--xxhash"), _SIGNALS[how])
            case ["launcher", "and", "keeper", how]:
                return signal_all([*self._find("--xxhash"), self.process.pid], _SIGNALS[how])
            case ["launcher", how]:
                return signal_all([self.process.pid] if self.process.poll() is None else [], _SIGNALS[how])
            case ["node", "suspended"]:  # as by a hypervisor: nobody is told, and time goes on
                found = [stat.pid for stat in marked(self.mark)]
                stopped = signal_all(found, signal.SIGSTOP)
                time.sleep(self._chance.uniform(*_SUSPENDED_S))
                signal_all(found, signal.SIGCONT)
                return stopped
            case ["clock", "stepped"]:
                step = self._chance.choice((-86_400, -60, 60, 86_400))
                with (self.directory / "clock").open("r+b") as file:
                    return file.write(struct.pack("q", step))
            case ["run", "dir", "removed"]:
                directories = list((self.directory / "tmp").glob("megatron_ft-*"))
                for path in directories:
                    shutil.rmtree(path, ignore_errors=True)  # the launcher may remove some of it, too
                return len(directories)
            case [*_, "disk", "full"]:
                with (
                    contextlib.suppress(OSError),
                    (self.directory / "save" / ".filler").open("wb", buffering=0) as file,
                ):
                    while True:
                        file.write(bytes(4096))
                return 1
        raise AssertionError(event.fault)

    def _servers(self) -> list[int]:
        """Process ids of fork servers; a rank has their name, too, until it runs."""
        records = launcher_records(self._logs(len(self._launches)))
        started = {r["pid"] for r in records if (r["ev"], r.get("state")) == ("fork_server", "started")}
        named = [stat.pid for stat in marked(self.mark) if stat.comm == FORK_SERVER_NAME]
        return [pid for pid in named if pid in started]

    def _find(self, pattern: str) -> list[int]:
        """Processes whose command line has this; one may still come: a launcher replaces monitors after a pause."""
        assert self.process is not None
        end = time.monotonic() + _COMES_S
        while True:
            found = [stat.pid for stat in marked(self.mark) if re.search(pattern, " ".join(command_line(stat.pid)))]
            if found or self.process.poll() is not None or time.monotonic() > end:
                return found
            time.sleep(0.05)

    def _free_disk(self) -> None:
        (self.directory / "save" / ".filler").unlink(missing_ok=True)

    # the end

    def note(self, number: int, event: Event) -> None:
        told = {"t": time.monotonic_ns(), "what": "fault", "number": number, "rank": event.rank}
        with (self.directory / "trace.jsonl").open("a") as file:
            file.write(json.dumps({**told, "cycle": event.cycle, "launch": event.launch}) + "\n")

    def _wait_gone(self, look: Callable[[], list[str]]) -> list[str]:
        """What is still there some seconds after the end of a launcher."""
        end = time.monotonic() + LEFT_S
        while (left := look()) and time.monotonic() < end:
            time.sleep(0.05)
        return left

    def _left(self) -> list[str]:
        names = [path.name for path in (self.directory / "tmp").iterdir()]
        files = [f"file {name}" for name in names if not name.startswith(_OF_OTHERS)]
        # what others use is of another run on this machine
        shared = set(os.listdir("/dev/shm")) - self._shared_memory
        shared -= self._mapped_by_others() if shared else set()
        return [*self._processes(), *files, *(f"shared memory {name}" for name in sorted(shared))]

    def _processes(self) -> list[str]:
        return [f"process {stat.pid} {' '.join(command_line(stat.pid))}" for stat in marked(self.mark)]

    def _mapped_by_others(self) -> set[str]:
        own = {stat.pid for stat in marked(self.mark)}
        found: set[str] = set()
        for pid in {int(name) for name in os.listdir("/proc") if name.isdigit()} - own:
            with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
                found.update(line.rpartition("/dev/shm/")[2].split()[0] for line in maps if "/dev/shm/" in line)
        return found

    def _kill_all(self) -> None:
        while found := marked(self.mark):
            signal_all([stat.pid for stat in found], signal.SIGKILL)
            time.sleep(0.01)
        if self.process is not None:
            self.process.wait()


def signal_all(pids: Iterable[int], number: int) -> int:
    """Signal processes that may be gone; how many weren't."""
    reached = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            reached += 1
    return reached
