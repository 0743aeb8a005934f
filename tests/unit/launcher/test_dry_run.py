"""``ft_launcher --ft-dry-run``: what it prints, and that it starts, opens and writes nothing."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from megatron_ft.cli import main as cli
from megatron_ft.launcher import main as launcher_main
from megatron_ft.launcher.main import main

# what nemo_run's ft_launcher component makes of run.FaultTolerance(...)
NEMO_RUN = (
    "--ft-workload_check_interval 10 --ft-initial_rank_heartbeat_timeout 1800 --ft-rank_heartbeat_timeout 600 "
    "--ft-rank_termination_signal SIGINT --ft-log_level INFO --max-restarts 3 --ft-use-infra-group-rank False "
    "--rdzv-backend c10d --rdzv-endpoint node0:49450 --rdzv-id 7 --nnodes 2 --nproc-per-node 1 --node-rank 0 --tee 3"
)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in [name for name in os.environ if name.startswith(("PET_", "FT_", "SLURM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(launcher_main, "THREAD_PREFIX", "no thread of ours")  # else one of another test ends pytest
    path = tmp_path / "train.py"
    path.write_text("raise AssertionError('started')")
    return str(path)


def rows(text: str) -> dict[str, str]:
    return {
        cells[0].strip(): cells[1].strip()
        for line in text.splitlines()
        if len(cells := line.strip().split("  ", 1)) == 2
    }


def test_dry_run_prints_each_flag_with_what_differs(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = script.replace("train.py", "ft.yaml")
    Path(path).write_text("train:\n  fault_tolerance:\n    rank_section_timeouts: {setup: 600, step: null}\n")
    flags = (
        "--ft-dry-run --nnodes 3:4 --nproc_per_node 2 --ft-safety-factor 3 --ft-enable-nic-monitor true --ft-learn on "
        f"--shutdown-timeout 7 --ft-cfg-path {path}"
    )
    assert main([*flags.split(), "--rdzv-endpoint", "node0:29500", script, "--ft-learn", "off"]) == 0
    told = rows(capsys.readouterr().out)
    assert told["--nnodes 3:4"].startswith("torchrun: Number of nodes, or MIN:MAX")
    assert told["--nproc_per_node 2"] == "torchrun: the same"
    assert told["--ft-safety-factor 3"].startswith("nvidia-resiliency-ext: the same formula;")
    assert told["--ft-enable-nic-monitor true"].startswith("nvidia-resiliency-ext: ignored (")
    assert told["--ft-learn on"] == "megatron_ft only"
    assert "--ft-learn off" not in told
    assert "--ft-dry-run" not in told
    assert told["safety_factor"].split() == ["3", "command", "line"]
    assert told["rank_section_timeouts[setup]"].split() == ["600", f"{path}:3"]
    assert told["rank_section_timeouts[step]"].split() == ["null", f"{path}:3"]
    assert told["term_timeout"].split() == ["7", "--shutdown-timeout"]
    assert told["rank_heartbeat_timeout"].split() == ["2700", "default"]
    assert told["nodes"] == "3 to 4"
    assert told["script"] == f"{script} (2 arguments)"


def test_line_of_nemo_run_is_served(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ft-dry-run", *NEMO_RUN.split(), script]) == 0
    assert "did you mean" not in capsys.readouterr().out


def test_dry_run_prints_all_mistakes_and_exits_with_2(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ft-dry-run", "--ft-learn=x", "--restart-policy=y", "--ft-nope", script]) == 2
    err = capsys.readouterr().err
    assert [line.split("error: ")[1].split()[0] for line in err.splitlines()] == [
        "--ft-learn",
        "--restart-policy",
        "unrecognized",
    ]


def test_dry_run_starts_opens_and_writes_nothing(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError("a dry run started a process or opened a port")

    monkeypatch.setattr("subprocess.Popen", refuse)
    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.setattr(os, "posix_spawn", refuse)
    monkeypatch.setattr(socket.socket, "bind", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    logs = ["--log-dir", str(tmp_path / "logs"), "--ft-log-dir", str(tmp_path / "ft")]
    for words in ([], logs, ["--nnodes=2", "--rdzv-endpoint=localhost:29500", *logs], ["--standalone"]):
        assert main(["--ft-dry-run", *words, script]) == 0
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]


def test_secrets_are_not_printed(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_SECRET", "hunter2-hunter2-hunter2")
    command = "curl -H 'Authorization: Bearer hunter2' https://me:hunter2@host/?token=hunter2"
    assert main(["--ft-dry-run", "--ft-node-health-command", command, script, "--api-key", "hunter2"]) == 0
    out = capsys.readouterr().out
    assert "hunter2" not in out
    assert rows(out)["FT_SECRET"] == "(not passed on)"  # the ranks' line comes last


def test_removed_command_names_the_option_to_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-launch", "job.sbatch"]) == 2
    assert "add --ft-dry-run" in capsys.readouterr().err
