"""Ranks that are forked from their own script can't tell: small programs print what they print under torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ft.launcher.base.environment import STARTUP
from tests.support.launching import END_IS_TOO_LATE, ROOT, Launched, Launcher, clean_environment, launcher

__all__ = ["launcher"]

PROGRAMS = ROOT / "tests" / "support" / "programs"
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py"))
END = "the end of the script"
# where each must have been forked, at the latest point that is safe
POINTS = {
    "arguments": "arguments.py:9 (reads RANK)",
    "asyncio_loop": "asyncio_loop.py:14 (makes an event loop)",
    "caches": "caches.py:23 (reads RANK)",
    "closes_stream": "closes_stream.py:7 (reads RANK)",
    "deletes": "deletes.py:16 (reads RANK)",
    "environment": "environment.py:16 (reads RANK)",
    "files": "files.py:13 (reads RANK)",
    "garbage": "garbage.py:13 (reads RANK)",
    "guarded": "guarded.py:10 (reads LOCAL_RANK)",
    "library_copies": "library_copies.py:7 (copies os.environ, in copies_environment)",
    "library_draws": "library_draws.py:7 (draws random numbers)",
    "library_settings": "library_settings.py:7 (reads all of os.environ, in keeps_settings)",
    "locks": "locks.py:13 (reads RANK)",
    "logs": "logs.py:10 (opens logs.py.log to write)",
    "logs_own_format": "logs_own_format.py:16 (asks for its process id)",
    "logs_process": "logs_process.py:8 (asks for its process id)",
    "marks_the_point": "marks_the_point.py:10 (calls fork_point())",
    "missing_variable": "missing_variable.py:6 (reads TORCHELASTIC_NOBODY_SETS_THIS)",
    "moves_streams": "moves_streams.py:12 (reads RANK)",
    "never_reads_rank": END,
    "own_hook": "own_hook.py:8 (reads RANK)",
    "patches": "patches.py:21 (reads RANK)",
    "prints": "prints.py:17 (reads RANK)",
    "process_group": "process_group.py:8 (draws random numbers (torch.uniform_) without a seed)",
    "raises": END,
    "rank_at_import": "reads_rank.py:5 (reads RANK)",
    "seeds": "seeds.py:14 (reads RANK)",
    "shell_at_import": "asks_shell.py:5 (starts a program)",
    "signals": "signals.py:10 (blocks signals)",
    "spawns": "spawns.py:21 (makes a pipe)",
    "subprocesses": "subprocesses.py:7 (starts a program)",
    "thread_at_import": "starts_thread.py:16 (starts a thread)",
    "warns": "warns.py:14 (reads RANK)",
    "whole_environment": "whole_environment.py:6 (reads all of os.environ)",
}


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, int]]:
    """What each program writes to its two streams, and its exit code: one torchrun for all of them."""
    directory = tmp_path_factory.mktemp("torchrun")
    words = " ".join(NAMES)
    command = f"""
names=({words}); name=${{names[$LOCAL_RANK]}}
export RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 MASTER_PORT=0
export TORCHELASTIC_USE_AGENT_STORE=False
{sys.executable} -u {PROGRAMS}/$name.py a "b c" > {directory}/$name.out 2> {directory}/$name.err
echo $? > {directory}/$name.code
"""
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={len(NAMES)}", "--no-python"),
            *("bash", "-c", command),
        ],
        env={**clean_environment(), "PYTHONPATH": str(ROOT), "TMPDIR": str(directory)},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=100,
    )
    return {
        name: (
            *(normal((directory / f"{name}.{stream}").read_text(), directory) for stream in ("out", "err")),  # type: ignore[misc]
            int((directory / f"{name}.code").read_text()),
        )
        for name in NAMES
    }


def normal(text: str, directory: Path) -> str:
    """Without what no two runs have in common."""
    # what serves the reference's names is there, and nothing else of ours
    text = text.replace(str(directory), "HERE").replace(f"{STARTUP}:", "")
    text = re.sub(r"<megatron_ft\.rank\.reference\.finder\._Finder object at 0x[0-9a-f]+>, ", "", text)
    text = re.sub(r"0x[0-9a-f]+|started \d+", "NUMBER", text)
    return re.sub(r"^\d+ \d+$", "PID PID", text, flags=re.MULTILINE)


def forked_at(launched: Launched) -> str:
    """What the launcher says of it, once."""
    (point,) = re.findall(r"ranks are forked at (.*), after \d+\.\d s of imports$", launched.err, re.MULTILINE)
    return str(point)


@pytest.mark.parametrize("name", NAMES)
def test_a_program_does_what_it_does_under_torchrun(
    launcher: Launcher, under_torchrun: dict[str, tuple[str, str, int]], name: str
) -> None:
    launched = launcher.start(
        [str(PROGRAMS / f"{name}.py"), "a", "b c"],
        *("--max-restarts=1", "--redirects=3", "--log-dir=logs"),
        env={"PYTHONPATH": str(ROOT)},
    )
    finished = launched.wait()
    if END_IS_TOO_LATE and POINTS[name] == END:
        assert "ranks start as fresh interpreters: RuntimeError: can't fork at interpreter shutdown" in finished.lines
    else:
        assert forked_at(launched) == POINTS[name]
    assert not launched.events("fork_failed"), finished.err
    exits = launched.events("rank_exited")
    assert [event["cycle"] for event in exits] == [0, 1], finished.err
    for cycle, event in enumerate(exits):
        (directory,) = launched.directory.glob(f"logs/*/attempt_{cycle}/0")
        found = [(directory / f"{stream}.log").read_text() for stream in ("stdout", "stderr")]
        found = [normal(text, launched.directory).replace(launched.temp_dir, "HERE") for text in found]
        assert (*found, event["exitcode"]) == under_torchrun[name], f"in cycle {cycle}"


UNSEEDED = """
import random, numpy, torch, os
first = random.Random().random()
os.environ["RANK"]
numbers = [random.random(), numpy.random.rand(), torch.rand(1).item(), random.Random().random()]
row = [*numbers, torch.initial_seed(), os.urandom(4).hex()]
print(" ".join(map(str, row)) + "\\n", end="", flush=True)  # in one piece: the other rank writes, too
if os.environ["FT_CYCLE"] == "0":
    import time
    open(os.environ["RANK"], "w").close()
    while not (os.path.exists("0") and os.path.exists("1")):
        time.sleep(0.01)
    os._exit(1)
"""


def test_unseeded_random_numbers_differ_in_all_ranks_and_cycles(launcher: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNSEEDED.replace("first = random.Random().random()\n", ""))
    launched = launcher.start([str(script)], "--nproc-per-node=2", "--max-restarts=1")
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert forked_at(launched) == "script.py:3 (reads RANK)"
    rows = [line.split() for line in finished.out.splitlines()]
    assert len(rows) == 4
    for column in zip(*rows, strict=True):
        assert len(set(column)) == 4
    script.write_text(UNSEEDED)
    launched = launcher.start([str(script)], "--nproc-per-node=2", "--max-restarts=1")
    assert launched.wait().code == 0
    assert forked_at(launched) == "script.py:3 (draws random numbers (random.Random))"


OF_THE_CYCLE = """
import os, sys
import newest
rank, cycle = os.environ["RANK"], int(os.environ["FT_CYCLE"])
print(rank, cycle, newest.CHECKPOINT, newest.DATE > newest.STARTED, flush=True)
os.makedirs(f"checkpoints/{cycle + 1}", exist_ok=True)
sys.exit(3 if cycle < 2 else 0)
"""
NEWEST = """
import datetime, os, subprocess, time
STARTED = time.time()
CHECKPOINT = subprocess.getoutput("ls checkpoints 2>/dev/null | wc -l")
DATE = datetime.datetime.now().timestamp()
"""


def test_program_output_read_at_import_is_that_of_each_cycle(launcher: Launcher, tmp_path: Path) -> None:
    """A script that resumes from the newest checkpoint, as a program tells it, resumes in each cycle."""
    (tmp_path / "script.py").write_text(OF_THE_CYCLE)
    (tmp_path / "newest.py").write_text(NEWEST)
    launched = launcher.start([str(tmp_path / "script.py")], "--max-restarts=2")
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert forked_at(launched) == "newest.py:4 (starts a program)"
    assert finished.out.splitlines() == ["0 0 0 True", "0 1 1 True", "0 2 2 True"]


def test_output_before_the_fork_has_the_prefix_of_each_rank(launcher: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('before')\nimport os\nprint('rank', os.environ['RANK'])\n")
    launched = launcher.start([str(script)], "--nproc-per-node=2", "--tee=3", "--log-dir=logs")
    finished = launched.wait()
    assert finished.code == 0, finished.err
    for rank in (0, 1):
        (log,) = launched.directory.glob(f"logs/*/attempt_0/{rank}/stdout.log")
        assert log.read_text() == f"before\nrank {rank}\n"
        assert f"]:rank {rank}" in finished.out
    assert len(re.findall(r"]:before$", finished.out, re.MULTILINE)) == 2


HANGS = """
from time import sleep
from megatron_ft import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
client.start_section("step")
sleep(1000)
"""


def test_place_of_a_rank_that_hangs_is_its_own_line_not_our_stand_in(launcher: Launcher, tmp_path: Path) -> None:
    """The script has taken the stand-in while it ran ahead."""
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    launched = launcher.start([str(script)], "--ft-param-rank_section_timeouts=step:1")
    finished = launched.wait()
    assert re.search(r"rank 0 hung in 'step' for .*, in hangs\.py:7 <module>;", finished.err), finished.err
    assert "replacing.py" not in finished.err


def test_error_at_the_fork_point_never_reaches_the_script(launcher: Launcher, tmp_path: Path) -> None:
    """It catches everything: it must not go on where it was run ahead, unwatched."""
    script = tmp_path / "script.py"
    script.write_text(
        "import gc, os, sys\n"
        "gc.freeze = lambda: 1 / 0\n"
        "try:\n    rank = os.environ['RANK']\nexcept BaseException:\n    rank = 'none'\n"
        "open(os.path.join(os.path.dirname(__file__), 'rank-' + rank), 'w').close()\n"
        "sys.exit(3)\n"
    )
    launched = launcher.start([str(script)])
    finished = launched.wait()
    assert finished.err.count("ranks start as fresh interpreters: ") == 1, finished.err
    assert [path.name for path in tmp_path.glob("rank-*")] == ["rank-0"]
