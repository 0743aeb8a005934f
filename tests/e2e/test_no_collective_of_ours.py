"""A Megatron GPT with learning issues exactly the collectives of the same run without hooks."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.extras import skip_module_without
from tests.support.launching import ROOT, Launcher, launcher

skip_module_without("megatron", "psutil")  # without psutil megatron-core's saves hang for ever

__all__ = ["launcher"]

COUNTING = """
import json, runpy
sys.path.insert(0, {examples!r})
import torch.distributed as dist
destroy, counts = dist.destroy_process_group, {{}}

def numbers():
    groups = dist.distributed_c10d._world.pg_names
    return sorted(group._get_sequence_number_for_group() for group in list(groups))

def count_and_destroy(*arguments):
    with open({out!r} + str(RANK), "w") as file:
        json.dump(numbers(), file)
    destroy(*arguments)

dist.destroy_process_group = count_and_destroy
runpy.run_path({script!r}, run_name="__main__")
"""
SMALL = ["--hidden-size=32", "--seq-length=16", "--vocab-size=32", "--train-iters=30", "--save-interval=10"]


def counts(launcher: Launcher, out: Path, *arguments: str) -> list[list[int]]:
    examples = ROOT / "examples"
    code = COUNTING.format(examples=str(examples), out=str(out), script=str(examples / "train_gpt.py"))
    finished = launcher.run(code, "--nproc-per-node", "2", script_args=[*SMALL, *arguments])
    assert finished.code == 0, finished.err
    return [json.loads(Path(f"{out}{rank}").read_text()) for rank in range(2)]


def test_learning_adds_no_collective_to_a_megatron_run(launcher: Launcher, tmp_path: Path) -> None:
    plain = counts(launcher, tmp_path / "plain", f"--save={tmp_path / 'a'}", "--no-ft")
    learning = counts(launcher, tmp_path / "learning", f"--save={tmp_path / 'b'}", "--calc-ft-timeouts")
    assert learning == plain
    assert all(sum(each) > 100 for each in plain)
    assert json.loads((tmp_path / "b" / "ft_state.json").read_text())["sections"].keys() >= {"step", "checkpointing"}
