"""What the README tells people to type works as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatron_ft.cli.main import main
from megatron_ft.launcher.arguments import parse
from tests.support.launching import ROOT, Launcher, clean_environment

README = (ROOT / "README.md").read_text()
PYPROJECT = (ROOT / "pyproject.toml").read_text()


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


COMMANDS = [
    line for block in blocks() for line in block.splitlines() if re.match(r"(ft_launcher|megatron-ft|pip) ", line)
]
BATCH = next(block for block in blocks() if block.startswith("#!/bin/bash"))
LOOP = next(block for block in blocks() if "fault_tolerance as ft" in block)
CLIENT = next(block for block in blocks() if block.startswith("from megatron_ft import RankMonitorClient"))
SCRIPT = f"""
import os, time
from pathlib import Path

DONE = Path("iteration")
device, end = "cpu", int(os.environ.get("END", "20"))
load_checkpoint = lambda: int(DONE.read_text()) if DONE.exists() else 0
save_checkpoint = lambda iteration: DONE.write_text(str(iteration)) if os.environ["RANK"] == "0" else None


def train_step():
    time.sleep(0.05)
    if state.train_state.step == 3 and os.environ["RANK"] == "0":
        print("in step 3", flush=True)
    is_cycle = os.environ.get("FT_CYCLE") == os.environ.get("KILL")
    if state.train_state.step == 12 and os.environ["RANK"] == "1" and is_cycle:
        os.kill(os.getpid(), 9)


{LOOP.replace("init_process_group()", "init_process_group('gloo')")}
print("trained to", state.train_state.step + 1, flush=True)
dist.destroy_process_group()
"""


def test_every_command_of_the_readme_has_a_test_here() -> None:
    assert [command.split()[0] for command in COMMANDS] == ["pip", "ft_launcher", "megatron-ft", "pip"]
    assert len(README.splitlines()) <= 120


def test_make_targets_exist() -> None:
    """What `make demo` and `make test` run is run by test_demo and by whoever reads this."""
    targets = sorted(set(re.findall(r"(?:`|^    )make (\w+)", README, re.MULTILINE)))
    subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, check=True)


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


def run_tool(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main([*words]) == 0
    return capsys.readouterr().out


def test_launch_command_restarts_the_loop_after_a_kill_and_the_report_says_so(
    launcher: Launcher, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(launcher.directory)
    command = next(command for command in COMMANDS if command.startswith("ft_launcher"))
    config = launcher.directory / "ft.yaml"
    (template,) = re.findall(r"`megatron-ft (config-template \w+) > ft.yaml`", README)
    config.write_text(run_tool(capsys, *template.split()))
    arguments = shlex.split(command.replace("--nproc-per-node 8", "--nproc-per-node 2"))[1:-1]
    launched = launcher.start(SCRIPT, *arguments, "--ft-cfg-path", str(config), env={"KILL": "0"})
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert finished.out.count("trained to 20") == 2
    assert (
        "rank 1 killed by SIGKILL (not sent by ft_launcher) after iteration 12; restarting as cycle 1" in finished.err
    )
    report = next(command for command in COMMANDS if command.startswith("megatron-ft report"))
    words = [str(launched.log_dir) if word == "LOG_DIR" else word for word in shlex.split(report)[1:]]
    assert "killed by SIGKILL" in run_tool(capsys, *words)
    assert "page.html" in os.listdir(launcher.directory)
    of_node, of_job = re.findall(r"`megatron-ft (status[^`]*)`", README)
    assert of_node == "status"
    words = of_job.replace("LOG_DIR", str(launched.log_dir)).split()
    assert "finished" in run_tool(capsys, *words)


def test_loop_saves_on_sigterm_and_goes_on_from_there(launcher: Launcher) -> None:
    launched = launcher.start(SCRIPT, "--nproc-per-node", "2", env={"END": "100000"})
    launched.wait_for("^in step 3")
    launched.signal(signal.SIGTERM)
    assert launched.wait().code == 0
    assert int((launched.directory / "iteration").read_text()) > 3


def test_loop_without_the_launcher_warns_once_and_trains(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    single = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = {**clean_environment(), **single, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("trained to 20\n")
    assert done.stderr.count("FT: WARNING: not started with ft_launcher") == 1


def test_client_as_it_stands_there(launcher: Launcher) -> None:
    finished = launcher.run(f"train_step = lambda: None\n{CLIENT}\n", "--ft-rank-section-timeouts=step:60")
    assert finished.code == 0, finished.err


def test_options_in_the_text_are_in_the_help_and_linked_files_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help-all"])
    told = capsys.readouterr().out
    elsewhere = " ".join([BATCH, *(command for command in COMMANDS if "report" in command), "--signal=TERM"])
    for option in set(re.findall(r"--[a-z][\w-]+", README)) - set(re.findall(r"--[a-z][\w-]+", elsewhere)):
        assert option in told, option
    (home,) = re.findall(r'^Homepage = "(.*)"$', PYPROJECT, re.MULTILINE)
    links = re.findall(r"\]\((http[^)]+)\)|^\[[\w-]+\]: (\S+)", README, re.MULTILINE)
    for link in (first or second for first, second in links):
        path = re.sub(r"^https://[^/]+/[^/]+/[^/]+/(blob/main/|tree/main/|main/)", "", link)
        assert link.startswith((home, home.replace("github.com", "raw.githubusercontent.com"))), link
        assert (ROOT / path).exists(), link
    assert not re.findall(r"\]\((?!http)", README), "PyPI shows the README, too: links are absolute"


def test_extras_that_the_readme_names_exist() -> None:
    section = PYPROJECT.partition("[project.optional-dependencies]")[2].partition("[project.scripts]")[0]
    extras = re.findall(r"^(\w+) = \[", section, re.MULTILINE)
    (listed,) = re.findall(r"^Extras: ([^#]*?)\n\n", README, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", listed)) == {*extras} - {"test", "docs"}
