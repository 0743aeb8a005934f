"""What the README tells people to type works as it stands there."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.launching import ROOT, Launcher, clean_environment, launcher

__all__ = ["launcher"]

README = (ROOT / "README.md").read_text()


def blocks() -> list[str]:
    """The indented blocks, dedented."""
    found, block = [], []
    for line in [*README.splitlines(), "end"]:
        if line.startswith("    ") or (block and not line.strip()):
            block.append(line)
        elif block:
            found.append(textwrap.dedent("\n".join(block)).strip())
            block = []
    return found


COMMANDS = [block for block in blocks() if re.match(r"(make|ft_launcher|megatron-ft|pip) ", block)]
BATCH = next(block for block in blocks() if block.startswith("#!/bin/bash"))
CODE = [block for block in blocks() if block.startswith("from megatron_ft import")]


def test_every_command_of_the_readme_has_a_test_here() -> None:
    assert sorted({command.split()[0] for command in COMMANDS}) == ["ft_launcher", "make", "megatron-ft", "pip"]
    assert len(COMMANDS) == 4
    assert len(CODE) == 2


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?:`|^    )make (\w+)", README, re.MULTILINE))))
def test_make_targets_exist(target: str) -> None:
    """What `make demo` and `make test` run is run by test_demo and by whoever reads this."""
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_batch_script_as_it_stands_there(tmp_path: Path) -> None:
    """What it does is tested by test_slurm_batch; this shows that its options are right."""
    script = BATCH.replace("megatron-ft slurm", f"{sys.executable} -m megatron_ft slurm --dry-run")
    (nodes,) = re.findall(r"#SBATCH --nodes=(\d+)", BATCH)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": nodes, "SLURM_JOB_NODELIST": f"n[1-{nodes}]"}
    environment = clean_environment() | slurm
    done = subprocess.run(["bash", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"srun --nodes={nodes} " in done.stdout
    assert f"--nnodes={int(nodes) - 1} --nproc-per-node 8 --max-restarts 10 train.py" in done.stdout


def test_the_launch_command_as_it_stands_there(launcher: Launcher) -> None:
    command = next(command for command in COMMANDS if command.startswith("ft_launcher"))
    arguments = shlex.split(command.replace("\\\n", " "))[1:]
    loop = next(code for code in CODE if "RankMonitorClient" in code)
    launched = launcher.start(f"train_step = lambda: None\n{loop}\nprint('trained')\n", *arguments[:-1])
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert finished.out.count("trained") == 8
    report = next(command for command in COMMANDS if command.startswith("megatron-ft report"))
    words = [str(launched.log_dir) if word == "LOG_DIR" else word for word in shlex.split(report)[1:]]
    told = subprocess.run(
        [sys.executable, "-m", "megatron_ft.cli.main", *words],
        cwd=launcher.directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "finished" in told.stdout
    assert {"page.html", "timeline.png"} <= set(os.listdir(launcher.directory))


def test_the_named_configuration_and_the_help_are_there() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_ft.launcher", "--help"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    elsewhere = " ".join([BATCH, *(command for command in COMMANDS if "report" in command)])
    for option in set(re.findall(r"--[a-z][\w-]+", README)) - set(re.findall(r"--[a-z][\w-]+", elsewhere)):
        assert option in done.stdout, option
    for path in re.findall(r"\]\(([^)]+)\)|((?:configs|examples)/[\w./]+)", README):
        assert (ROOT / (path[0] or path[1])).exists(), path


def test_the_hooks_as_they_stand_there(launcher: Launcher, tmp_path: Path) -> None:
    code = next(code for code in CODE if "fault_tolerance" in code)
    ast.parse(code)
    script = "\n".join(
        [
            "import os, torch.distributed as dist",
            "dist.init_process_group('gloo')",
            "load_checkpoint = train_step = save_checkpoint = lambda: None",
            "start, end = 0, 20",
            "from megatron_ft import fault_tolerance as ft",
            re.search(r"`(state = ft.GlobalState[^`]*)`", README)[1].replace("DIR", repr(str(tmp_path / "save"))),  # type: ignore[index]
            "config = state.cfg",
            code,
            "dist.destroy_process_group()",
        ]
    )
    finished = launcher.run(script, "--nproc-per-node", "2")
    assert finished.code == 0, finished.err
    assert (tmp_path / "save" / "ft_state.json").exists()


def test_extras_that_the_readme_names_exist() -> None:
    extras = importlib.metadata.metadata("megatron_ft").get_all("Provides-Extra")
    for name in re.findall(r"pip install \"\.\[(\w+)\]\"", README):
        assert name in extras
