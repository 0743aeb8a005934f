"""examples/autoresume: one job after the other until the training says that it is finished."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launching import ROOT, clean_environment, command_line, marked, wait_until

pytestmark = pytest.mark.timeout(300)
SCRIPT = ROOT / "examples/autoresume/launch.sh"
START_S = 60.0


class Loop:
    """The script, running in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.script = SCRIPT
        self.flag = directory / "finished"
        self.output = directory / "output"
        self.mark = f"FT_TEST_MARK={os.urandom(8).hex()}"
        self.temp_dir = tempfile.mkdtemp(prefix="ft")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *command: str, **environment: str) -> None:
        name, _, value = self.mark.partition("=")
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [str(self.script), *command],
                env={
                    **clean_environment(),
                    "PYTHONPATH": str(ROOT),
                    "TMPDIR": self.temp_dir,
                    "TORCHINDUCTOR_CACHE_DIR": str(self.directory / "inductor"),  # else torch leaves it in TMPDIR
                    name: value,
                    "FAULT_TOL_FINISHED_FLAG_FILE": str(self.flag),
                    **environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, *command: str, **environment: str) -> int:
        self.start(*command, **environment)
        assert self.process is not None
        return self.process.wait(START_S)

    def text(self) -> str:
        return self.output.read_text()

    def says(self) -> list[str]:
        head = "[launch.sh] "
        return [line.removeprefix(head) for line in self.text().splitlines() if line.startswith(head)]

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.text(), START_S)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    loop = Loop(tmp_path)
    try:
        yield loop
        wait_until(lambda: not marked(loop.mark) and not os.listdir(loop.temp_dir), 10.0)
    finally:
        for stat in marked(loop.mark):
            os.kill(stat.pid, signal.SIGKILL)
        if loop.process is not None:
            loop.process.kill()
            loop.process.wait()
        left = sorted(str(path) for path in Path(loop.temp_dir).rglob("*"))
        shutil.rmtree(loop.temp_dir)
        assert left == []


def test_loop_restarts_a_killed_job_until_the_training_is_finished(loop: Loop, tmp_path: Path) -> None:
    """Real jobs: the launcher of the first is killed, and the second goes on from its checkpoint to the end."""
    save, iterations = tmp_path / "save", tmp_path / "iterations"
    iterations.write_text("1000000000")
    words = [sys.executable, "-m", "megatron_ft.launcher"]
    job = [*words, "--ft-log-dir", str(tmp_path / "logs"), str(ROOT / "examples/autoresume/train.py")]
    asks = ["bash", "-c", f'exec "$@" --train-iters="$(cat {iterations})"', "bash"]
    command = [*asks, *job, "--save", str(save), "--save-interval=5"]
    loop.start(*command)

    loop.wait_for("saved iteration 5,")
    (launcher,) = [stat.pid for stat in marked(loop.mark) if command_line(stat.pid)[:3] == words]
    saved = re.findall(r"saved iteration (\d+),", loop.text())[-1]
    iterations.write_text(str(int(saved) + 100))  # for the second job
    os.kill(launcher, signal.SIGKILL)

    assert loop.process is not None
    assert loop.process.wait(START_S) == 0, loop.text()
    ended = f"the training is finished: {iterations.read_text()} iterations"
    assert loop.says() == [
        "job 1 starts",
        "job 1 failed with exit code 137: failure 1 of at most 3",
        "job 2 starts",
        f"job 2 ended with exit code 0, and {loop.flag} says: {ended}",
    ]
    begins = [int(line.split()[-1]) for line in loop.text().splitlines() if line.startswith("training from iteration")]
    assert begins[0] == 0 < begins[1]
    # started again, it has nothing to do
    assert loop.run(*command) == 0
    assert loop.says() == [f"nothing to do: {loop.flag} says: {ended} (remove it to train again)"]


FAIL = "echo failing; exit 3"


@pytest.mark.parametrize(
    ("script", "environment", "code", "jobs", "last"),
    [
        (FAIL, {}, 3, 3, "job 3 failed with exit code 3: failure 3 of at most 3"),
        ("kill -9 $$", {"MAX_FAILURES": "1"}, 137, 1, "job 1 failed with exit code 137: failure 1 of at most 1"),
        ("exit 2", {}, 2, 1, "job 1 ended with exit code 2, a mistake that another job would meet again"),
        ("exit 93", {}, 93, 1, "job 1 ended with exit code 93: it gets no further, and another job wouldn't either"),
        (
            "exit 7",
            {"NO_RESTART_EXIT_CODE": "7"},
            7,
            1,
            "job 1 ended with exit code 7: it gets no further, and another job wouldn't either",
        ),
        ("exit 94", {"MAX_JOBS": "4"}, 1, 4, "4 jobs, and the training isn't finished"),
        (
            'echo done > "$FAULT_TOL_FINISHED_FLAG_FILE"',
            {},
            0,
            1,
            "job 1 ended with exit code 0, and {flag} says: done",
        ),
    ],
)
def test_loop_ends_with_the_code_and_line_of_its_last_job(
    loop: Loop, script: str, environment: dict[str, str], code: int, jobs: int, last: str
) -> None:
    assert loop.run("bash", "-c", script, **environment) == code
    assert sum(line.endswith(" starts") for line in loop.says()) == jobs
    assert loop.says()[-1] == last.format(flag=loop.flag)


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        (0, "job 1 ended well; there is more to train"),
        (94, "job 1 ended with exit code 94: the job couldn't go on, and can be started again"),
    ],
)
def test_job_that_was_stopped_or_asks_to_be_started_again_is_no_failure(
    loop: Loop, tmp_path: Path, code: int, ended: str
) -> None:
    count = tmp_path / "count"
    more = f"echo x >> {count}; [ $(wc -l < {count}) -lt 6 ] && exit {code}"
    assert loop.run("bash", "-c", f'{more}; echo done > "$FAULT_TOL_FINISHED_FLAG_FILE"', MAX_FAILURES="1") == 0
    assert loop.says()[1:3] == [ended, "job 2 starts"]
    assert len(count.read_text().splitlines()) == 6


@pytest.mark.parametrize(
    ("command", "environment"),
    [([], {}), (["true"], {"FAULT_TOL_FINISHED_FLAG_FILE": ""}), (["true"], {"MAX_FAILURES": "many"})],
)
def test_mistake_on_the_command_line_prints_the_usage(
    loop: Loop, command: list[str], environment: dict[str, str]
) -> None:
    assert loop.run(*command, **environment) == 2
    assert loop.says()[0].startswith("usage: ")


@pytest.mark.parametrize(("name", "code", "delay_s"), [("TERM", 143, 0), ("INT", 130, 0), ("TERM", 143, 1)])
def test_a_signal_is_passed_on_and_waited_for(loop: Loop, name: str, code: int, delay_s: int) -> None:
    """Also if it comes before the number of the job is known."""
    loop.script = loop.directory / "launch.sh"
    text = SCRIPT.read_text()
    assert text.count("    job_pid=$!\n") == 1
    loop.script.write_text(text.replace("    job_pid=$!\n", f"    sleep {delay_s}\n    job_pid=$!\n"))
    loop.script.chmod(0o700)
    # the job takes a moment to save, as a training would
    loop.start("bash", "-c", f"trap 'sleep 0.3; echo saved; exit 0' {name}; echo ready; while :; do sleep 0.02; done")
    loop.wait_for("ready")
    assert loop.process is not None
    os.kill(loop.process.pid, getattr(signal, f"SIG{name}"))
    assert loop.process.wait(START_S) == code
    assert "saved" in loop.text()
    assert loop.says()[1:] == [
        f"passing SIG{name} on to the job",
        f"stopped by SIG{name}; job 1 ended with exit code 0; the training isn't finished",
    ]
