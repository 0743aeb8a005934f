"""Small programs print under ft_launcher, in the first and in the second cycle, what they print under torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ft.run_ahead.startup import STARTUP
from tests.support.launching import ROOT, Launcher, clean_environment

PROGRAMS = ROOT / "tests" / "support" / "programs"
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py"))


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
    text = re.sub(
        r"<megatron_ft\.rank\.(reference\.finder\._Finder|base\.replacing\.ImportHook) object at 0x[0-9a-f]+>, ",
        "",
        text,
    )
    text = re.sub(r"0x[0-9a-f]+|started \d+", "NUMBER", text)
    return re.sub(r"^\d+ \d+$", "PID PID", text, flags=re.MULTILINE)


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
    assert "fork failed" not in [each["state"] for each in launched.events("fork_server")], finished.err
    exits = launched.events("rank_exited")
    assert [event["cycle"] for event in exits] == [0, 1], finished.err
    for cycle, event in enumerate(exits):
        (directory,) = launched.directory.glob(f"logs/*/attempt_{cycle}/0")
        found = [(directory / f"{stream}.log").read_text() for stream in ("stdout", "stderr")]
        found = [normal(text, launched.directory).replace(launched.temp_dir, "HERE") for text in found]
        assert (*found, event["exitcode"]) == under_torchrun[name], f"in cycle {cycle}"
