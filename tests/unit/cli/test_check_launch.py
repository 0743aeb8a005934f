"""`megatron-ft check-launch`: what each flag of another launcher's line means, out of scripts, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ft.cli import main as cli
from megatron_ft.cli.check_launch import LaunchLine, Meaning, find_launch_lines

SBATCH = r"""#!/bin/bash
#SBATCH --nodes=4
# torchrun in a comment
GPUS_PER_NODE=8
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes 3:4
    --rdzv-endpoint $MASTER:29500
)
FT="--ft-param-rank_heartbeat_timeout=600 --ft-enable-nic-monitor true --ft-nope 3"
which ft_launcher
srun -l bash -c "ft_launcher ${DISTRIBUTED_ARGS[@]} $FT --monitor-interval 1 \
    pretrain_gpt.py --save /x && echo done"
"""
# what nemo_run's ft_launcher component makes of run.FaultTolerance(...)
NEMO_RUN = (
    "srun --nodes 2 ft_launcher --ft-workload_check_interval 10 --ft-initial_rank_heartbeat_timeout 1800 "
    "--ft-rank_heartbeat_timeout 600 --ft-rank_termination_signal SIGINT --ft-log_level INFO --max-restarts 3 "
    "--ft-use-infra-group-rank False --rdzv-backend c10d --rdzv-endpoint $head_node_ip:49450 --rdzv-id 7 --nnodes 2 "
    "--nproc-per-node 8 --node-rank $SLURM_NODEID --tee 3 --no-python nemo-run train"
)


def meanings(line: LaunchLine) -> dict[str, Meaning]:
    return {flag.words[0].partition("=")[0]: flag.meaning for flag in line.flags}


def test_out_of_an_sbatch_script() -> None:
    (line,) = find_launch_lines(SBATCH)
    assert meanings(line) == {
        "--nproc_per_node": Meaning.WORKS,
        "--nnodes": Meaning.DIFFERS,
        "--rdzv-endpoint": Meaning.DIFFERS,
        "--ft-param-rank_heartbeat_timeout": Meaning.WORKS,
        "--ft-enable-nic-monitor": Meaning.IGNORED,
        "--ft-nope": Meaning.REFUSED,
        "--monitor-interval": Meaning.WORKS,
    }
    assert line.script == ("pretrain_gpt.py", "--save", "/x")
    assert line.to_use == (
        "ft_launcher --nproc_per_node 8 --nnodes 3:4 --rdzv-endpoint $MASTER:29500 "
        "--ft-param-rank_heartbeat_timeout=600 --monitor-interval 1 pretrain_gpt.py --save /x"
    )


@pytest.mark.parametrize(
    ("backend", "meaning"),
    [("etcd-v2", Meaning.REFUSED), ("static", Meaning.DIFFERS), ("$BACKEND", Meaning.DIFFERS)],
)
def test_a_rendezvous_backend_that_is_not_served_is_refused_and_left_out(backend: str, meaning: Meaning) -> None:
    (line,) = find_launch_lines(f"torchrun --nnodes 2 --rdzv-backend {backend} train.py")
    assert meanings(line)["--rdzv-backend"] is meaning
    assert (backend in line.to_use) is (meaning is not Meaning.REFUSED)


def test_a_line_of_nemo_run() -> None:
    (line,) = find_launch_lines(NEMO_RUN)
    assert set(meanings(line).values()) == {Meaning.WORKS, Meaning.DIFFERS}
    assert line.before == ("srun", "--nodes", "2")
    assert line.script == ("nemo-run", "train")


@pytest.mark.parametrize(
    ("text", "launcher"),
    [
        ("torchrun --standalone t.py", "torchrun"),
        ("/opt/bin/torchrun t.py", "/opt/bin/torchrun"),
        ("python -u -m torch.distributed.run --nnodes 2 t.py", "python -u -m torch.distributed.run"),
        ("X=1 python3 -m nvidia_resiliency_ext.fault_tolerance.launcher t.py", ""),
        ("srun 'sh -c \"torchrun t.py\"'", "torchrun"),
        ("megatron-ft launch t.py", "megatron-ft launch"),
    ],
)
def test_launchers(text: str, launcher: str) -> None:
    (line,) = find_launch_lines(text)
    assert launcher in line.launcher
    assert line.script == ("t.py",)


@pytest.mark.parametrize("text", ["ls", "which torchrun", "# torchrun t.py", "X='torchrun'", "echo '"])
def test_no_line(text: str) -> None:
    assert find_launch_lines(text) == []


def test_flags() -> None:
    (line,) = find_launch_lines(
        "torchrun --te 3 -m --standalone --ft-cfg-path=a.yaml --restart-policy never pkg.train -x"
    )
    assert meanings(line) == {
        "--te": Meaning.WORKS,
        "-m": Meaning.WORKS,
        "--standalone": Meaning.DIFFERS,
        "--ft-cfg-path": Meaning.WORKS,
        "--restart-policy": Meaning.REFUSED,
    }
    assert line.script == ("pkg.train", "-x")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(SBATCH)
    assert cli.main(["check-launch", str(script)]) == 1
    out = capsys.readouterr().out
    assert "--ft-nope 3" in out
    assert "refused: unknown option" in out
    assert "use:\n  ft_launcher --nproc_per_node 8" in out
    assert cli.main(["check-launch", "torchrun", "--nproc-per-node=8", "t.py"]) == 0
    assert "--nproc-per-node=8  works" in capsys.readouterr().out
    for words in (["check-launch"], ["check-launch", "ls"], ["check-launch", "ls", "-l"]):
        assert cli.main(words) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_launcher_of_the_reference_that_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "ft_launcher"
    other.write_text("#!/usr/bin/python3\nfrom nvidia_resiliency_ext.fault_tolerance.launcher import main\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["check-launch", "torchrun", "t.py"]) == 0
    assert "use `megatron-ft launch`" in capsys.readouterr().out
