"""`megatron-ft slurm` from its start to its end, with stand-ins for srun, scancel and scontrol."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.job.rules.lives import Lives
from tests.support.launching import ROOT, clean_environment, wait_until
from tests.support.slurm_stand_ins import install

LAUNCHER = """#!{python}
import os, signal, sys, time
sys.path.insert(0, {root!r})
from megatron_ft.job.rules.lives import Ending, Life, Lives
if os.environ["SLURM_PROCID"] != "0":
    sys.exit(0)
result = {home!r} + "/logs/result.json"
os.makedirs(os.path.dirname(result), exist_ok=True)
lives = Lives.parse(open(result).read()) if os.path.exists(result) else Lives()
scenario = open({home!r} + "/scenario").read().split()
how, code = scenario[len(lives.lives)].split(":")
lives = lives.begun(Life(job=os.environ["SLURM_STEP_ID"]))
def write(ending):
    life = lives.lives[-1]
    told = Life(job=life.job, outcome=Ending(ending))
    with open(result + ".new", "w") as file:
        file.write(lives.updated(told).to_text())
    os.replace(result + ".new", result)
if how == "stays":
    write("finished")
    time.sleep(600)
def stop(*_):
    write("stopped")
    os._exit(int(code))
signal.signal(signal.SIGTERM, stop)
write("running")
if how == "waits":
    while True:
        time.sleep(0.01)
write(how)
sys.exit(int(code))
"""


class Bench:
    """One job of Slurm's, whose launchers end as a scenario says: a word for each life, its end and the exit code."""

    def __init__(self, home: Path, scenario: str) -> None:
        self.home = home
        self.main = ["-m", "megatron_ft.cli.main"]
        self.started: list[subprocess.Popen[bytes]] = []
        (home / "scenario").write_text(scenario)
        self._path = install(home)
        program = home / "ft_launcher"
        program.write_text(LAUNCHER.format(python=sys.executable, root=str(ROOT), home=str(home)))
        program.chmod(0o755)

    def start(self, *options: str, arguments: tuple[str, ...] = ("t.py",), **environ: str) -> subprocess.Popen[bytes]:
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "PYTHONPATH": str(ROOT)}
        path = f"{self._path}:{os.environ['PATH']}"
        command = [sys.executable, *self.main, "slurm", *options]
        if "--launcher" not in options:
            command += ["--launcher", str(self.home / "ft_launcher")]
        command += ["--", f"--ft-log-dir={self.home / 'logs'}", *arguments]
        with (self.home / "err").open("a") as err:
            environment = {**clean_environment(), **job, "PATH": path, **environ}
            process = subprocess.Popen(command, env=environment, cwd=self.home, stdout=err, stderr=err)
        self.started.append(process)
        return process

    def run(self, *options: str, **environ: str) -> int:
        return self.start(*options, **environ).wait(60)

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.home / "calls").read_text().splitlines()]

    def called(self, *names: str) -> list[str]:
        """The commands that changed something, without options of srun."""
        found = [" ".join(call) for call in self.calls if call[0] != "srun" and "show" not in call]
        return [call for call in found if call.startswith(names)]

    @property
    def steps(self) -> int:
        return sum(call[0] == "srun" for call in self.calls)

    @property
    def outcomes(self) -> list[str]:
        return [life.outcome.value for life in Lives.parse((self.home / "logs" / "result.json").read_text()).lives]

    def wait_for_steps(self, count: int) -> None:
        """Until that step runs, and its launcher waits."""
        written = [self.home / "pids", self.home / "logs" / "result.json"]
        wait_until(lambda: all(map(Path.exists, written)) and self.outcomes.count("running") == 1, 60.0)
        assert self.steps == count


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    pids = tmp_path / "pids"
    for pid in pids.read_text().split() if pids.exists() else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def test_batch_continues_in_its_allocation_until_the_training_is_finished_and_then_starts_nothing(home: Path) -> None:
    bench = Bench(home, "lost:94 failed:1 finished:0")
    assert bench.run() == 0
    assert (bench.steps, bench.outcomes, bench.called("sc")) == (3, ["lost", "failed", "finished"], [])
    assert "--kill-on-bad-exit=0" in bench.calls[-2] or "--kill-on-bad-exit=0" in bench.calls[-1]
    (home / "finished").touch()
    assert bench.run(FAULT_TOL_FINISHED_FLAG_FILE=str(home / "finished")) == 0
    assert bench.steps == 3


def test_a_job_that_is_being_cancelled_is_not_requeued(home: Path) -> None:
    bench = Bench(home, "waits:0")
    (home / "job").write_text("JobId=7 JobState=CANCELLED NodeList=localhost NumNodes=3")
    batch = bench.start()
    bench.wait_for_steps(1)
    batch.send_signal(signal.SIGTERM)
    assert batch.wait(60) == 94
    assert bench.called("scontrol") == []


def test_srun_that_stays_when_the_life_has_ended_is_ended(home: Path) -> None:
    """As the real one does, where a slurmstepd was killed."""
    bench = Bench(home, "stays:0")
    quick = "from megatron_ft.cli.slurm import batch; batch._LOOK_S = batch._STAYS_S = 0.1; batch._ENDS_S = 1.0"
    bench.main = ["-c", f"{quick}; from megatron_ft.cli.main import main; raise SystemExit(main())"]
    assert bench.run() == 0
    assert "terminating srun" in (home / "err").read_text()


def test_batch_with_real_launchers_stops_requeues_and_finishes(home: Path) -> None:
    script = home / "train.py"
    script.write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
        "again = 'SLURM_RESTART_COUNT' in os.environ\n"
        "open('ready', 'w').close()\n"
        "while not again:\n    time.sleep(0.01)\n"
    )
    bench = Bench(home, "")
    real = home / "real_launcher"
    real.write_text(f'#!/bin/sh\nexec {sys.executable} -m megatron_ft.launcher "$@"\n')
    real.chmod(0o755)
    options = ("--launcher", str(real))
    job = {"SLURM_JOB_ID": str(os.getpid() * 100), "SLURM_JOB_NUM_NODES": "1"}
    batch = bench.start(*options, arguments=(str(script),), **job)
    wait_until((home / "ready").exists, 60.0)
    batch.send_signal(signal.SIGTERM)
    batch.send_signal(signal.SIGUSR1)  # Slurm sends its signal twice
    assert batch.wait(60) == -signal.SIGKILL  # the stand-in does what Slurm does to a job that is requeued
    number = job["SLURM_JOB_ID"]
    assert bench.called("sc") == [f"scancel --signal=TERM {number}", f"scontrol requeue {number}"]
    assert bench.start(*options, arguments=(str(script),), SLURM_RESTART_COUNT="1", **job).wait(60) == 0
    assert bench.outcomes == ["stopped", "finished"]


def test_environment_that_srun_keeps_from_the_launchers_is_warned_of(home: Path) -> None:
    bench = Bench(home, "finished:0")
    launcher = home / "ft_launcher"
    note = f"open({str(home / 'secret')!r}, 'w').write(os.environ.get('FT_SECRET', ''))\n"
    launcher.write_text(launcher.read_text().replace("\nwrite(how)\n", f"\n{note}write(how)\n"))
    assert bench.run("--srun=--export=NONE", FT_SECRET="0" * 32, SLURM_EXPORT_ENV="PATH,HOME") == 0
    assert (home / "secret").read_text() == ""
    assert "srun's --export keeps FT_SECRET from the launchers" in (home / "err").read_text()


def test_status_asks_all_nodes_of_the_job_and_a_job_without_nodes_is_one_line(home: Path) -> None:
    environment = {**clean_environment(), "PYTHONPATH": str(ROOT), "SLURM_JOB_NUM_NODES": "3"}
    environment["PATH"] = f"{install(home)}:{environment['PATH']}"

    def status() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "megatron_ft.cli.main", "status", "--slurm", "7"]
        return subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=60)

    status()
    calls = map(json.loads, (home / "calls").read_text().splitlines())
    (asked,) = [call for call in calls if call[0] == "srun"]
    assert {"--jobid=7", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--overlap", "--no-kill"} <= set(asked)
    (home / "job").write_text("JobId=7 JobState=PENDING NumNodes=2-4 NodeList=")
    refused = status()
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "isn't running: Slurm reports it as PENDING" in refused.stderr
