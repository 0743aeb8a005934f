"""examples/autoresume: one job after the other until the training says that it is finished."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launching import ROOT, Finished, Launched, Launcher, command_line, gone_at_the_end

pytestmark = pytest.mark.timeout(300)
SCRIPT = ROOT / "examples/autoresume/launch.sh"


class Loop(Launcher):
    """The script in the launcher's place."""

    @property
    def flag(self) -> Path:
        return self.directory / "finished"

    def start_jobs(self, *command: str, **environment: str) -> Launched:
        """Start it with the command of a job."""
        return self.start(command, env={"FAULT_TOL_FINISHED_FLAG_FILE": str(self.flag), **environment})

    def run_jobs(self, *command: str, **environment: str) -> tuple[int, list[str]]:
        """Return its exit code, and its lines."""
        ended = self.start_jobs(*command, **environment).wait()
        return ended.code, says(ended)


def says(loop: Finished) -> list[str]:
    return re.findall(r"^\[launch\.sh\] (.*)$", loop.err, re.MULTILINE)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    with gone_at_the_end(Loop(tmp_path, program=[str(SCRIPT)])) as made:
        yield made


def test_loop_restarts_a_killed_job_until_the_training_is_finished(loop: Loop, tmp_path: Path) -> None:
    """Real jobs: the launcher of the first is killed, and the second goes on from its checkpoint to the end."""
    save, iterations = tmp_path / "save", tmp_path / "iterations"
    iterations.write_text("1000000000")
    words = [sys.executable, "-m", "megatron_ft.launcher"]
    job = [*words, "--ft-log-dir", str(tmp_path / "logs"), str(ROOT / "examples/autoresume/train.py")]
    asks = ["bash", "-c", f'exec "$@" --train-iters="$(cat {iterations})"', "bash"]
    command = [*asks, *job, "--save", str(save), "--save-interval=5"]
    running = loop.start_jobs(*command)

    running.wait_for("saved iteration 5,")
    (launcher,) = [stat.pid for stat in running.alive() if command_line(stat.pid)[:3] == words]
    saved = running.wait_for(r"saved iteration (\d+),")[-1]
    iterations.write_text(str(int(saved) + 100))  # for the second job
    os.kill(launcher, signal.SIGKILL)

    ended = running.wait()
    assert ended.code == 0, ended.err
    done = f"the training is finished: {iterations.read_text()} iterations"
    assert says(ended) == [
        "job 1 starts",
        "job 1 failed with exit code 137: failure 1 of at most 3",
        "job 2 starts",
        f"job 2 ended with exit code 0, and {loop.flag} says: {done}",
    ]
    begins = [*map(int, re.findall(r"^training from iteration (\d+)$", ended.out, re.MULTILINE))]
    assert begins[0] == 0 < begins[1]
    # started again, it has nothing to do
    nothing = f"nothing to do: {loop.flag} says: {done} (remove it to train again)"
    assert loop.run_jobs(*command) == (0, [nothing])


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
    found, lines = loop.run_jobs("bash", "-c", script, **environment)
    assert (found, sum(line.endswith(" starts") for line in lines)) == (code, jobs)
    assert lines[-1] == last.format(flag=loop.flag)


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
    script = f'{more}; echo done > "$FAULT_TOL_FINISHED_FLAG_FILE"'
    found, lines = loop.run_jobs("bash", "-c", script, MAX_FAILURES="1")
    assert (found, lines[1:3]) == (0, [ended, "job 2 starts"])
    assert len(count.read_text().splitlines()) == 6


@pytest.mark.parametrize(
    ("command", "environment"),
    [([], {}), (["true"], {"FAULT_TOL_FINISHED_FLAG_FILE": ""}), (["true"], {"MAX_FAILURES": "many"})],
)
def test_mistake_on_the_command_line_prints_the_usage(
    loop: Loop, command: list[str], environment: dict[str, str]
) -> None:
    code, lines = loop.run_jobs(*command, **environment)
    assert code == 2
    assert lines[0].startswith("usage: ")


@pytest.mark.parametrize(("name", "code", "delay_s"), [("TERM", 143, 0), ("INT", 130, 0), ("TERM", 143, 1)])
def test_a_signal_is_passed_on_and_waited_for(loop: Loop, name: str, code: int, delay_s: int) -> None:
    """Also if it comes before the number of the job is known."""
    script, text = loop.directory / "launch.sh", SCRIPT.read_text()
    assert text.count("    job_pid=$!\n") == 1
    script.write_text(text.replace("    job_pid=$!\n", f"    sleep {delay_s}\n    job_pid=$!\n"))
    loop.program = ["bash", str(script)]
    # the job takes a moment to save, as a training would
    saves = f"trap 'sleep 0.3; echo saved; exit 0' {name}; echo ready; while :; do sleep 0.02; done"
    running = loop.start_jobs("bash", "-c", saves)
    running.wait_for("ready")
    running.signal(getattr(signal, f"SIG{name}"))
    ended = running.wait()
    assert (ended.code, "saved" in ended.out) == (code, True)
    assert says(ended)[1:] == [
        f"passing SIG{name} on to the job",
        f"stopped by SIG{name}; job 1 ended with exit code 0; the training isn't finished",
    ]
