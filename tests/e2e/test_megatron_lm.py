"""The Megatron-LM adapter in real ranks under the launcher, with argparse arguments and FT_SIM_FAULT_DESC."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.support.launching import Launcher, launcher

__all__ = ["launcher"]
IMPORTED_BEFORE = ()  # torch is enough

TWO = ("--nproc-per-node", "2")
OPTIONS = (
    "--ft-rank-section-timeouts=setup:60,step:3,checkpointing:6",
    "--ft-rank-out-of-section-timeout=60",
)
# In the order of Megatron-LM's training.py: finalise, number, step, save.
LOOP = """
import argparse
import torch, torch.distributed as dist
from megatron_ft.integrations import megatron_lm as ft_integration

parser = ft_integration.add_ft_args(argparse.ArgumentParser())
parser.add_argument("--save", required=True)
parser.add_argument("--train-iters", type=int, required=True)
parser.add_argument("--step-s", type=float, default=0.01)
args = parser.parse_args()

dist.init_process_group("gloo")
assert not torch.cuda.is_available()
fault = os.environ.pop("FT_SIM_FAULT_DESC", "")  # setup() would start it at once, in every cycle
if args.enable_ft_package:
    ft_integration.setup(args)
checkpoint = os.path.join(args.save, "iteration")
iteration = int(open(checkpoint).read()) if os.path.exists(checkpoint) else 0
say("cycle", CYCLE, "begins at", iteration)
if iteration:
    ft_integration.on_checkpoint_loaded(is_local_chkpt=False)
dist.barrier()
while iteration < args.train_iters:
    ft_integration.on_checkpointing_start()
    ft_integration.on_checkpointing_end(is_async_finalization=True)
    if CYCLE == 0 and iteration == 12:  # so that there is a checkpoint to resume from
        os.environ["FT_SIM_FAULT_DESC"] = fault
        ft_integration.maybe_setup_simulated_fault()
    args.curr_iteration = iteration
    ft_integration.on_training_step_start()
    dist.all_reduce(torch.ones(4))
    time.sleep(args.step_s)
    ft_integration.on_training_step_end()
    iteration += 1
    if iteration % 10 == 0:
        ft_integration.on_checkpointing_start()
        if RANK == 0:
            with open(checkpoint + ".new", "w") as file:
                file.write(str(iteration))
            os.replace(checkpoint + ".new", checkpoint)
        dist.barrier()
        ft_integration.on_checkpointing_end(is_async_finalization=False)
for _ in range(3):
    ft_integration.on_eval_step_start()
    dist.barrier()
    ft_integration.on_eval_step_end()
ft_integration.shutdown()
ft_integration.on_training_step_start()
dist.destroy_process_group()
"""


def test_a_rank_hangs_and_the_run_goes_on_and_learns(launcher: Launcher, tmp_path: Path) -> None:
    arguments = ["--enable-ft-package", "--calc-ft-timeouts", "--ft-num-warmup-iters=3", f"--save={tmp_path / 'save'}"]
    launched = launcher.start(
        LOOP,
        *TWO,
        "--max-restarts=2",
        *OPTIONS,
        script_args=[*arguments, "--train-iters=60", "--step-s=0.03"],
        env={"FT_SIM_FAULT_DESC": "rank_hung;;0.2"},
    )
    finished = launched.wait(100)
    assert finished.code == 0, finished.err

    # which rank it is was decided in a broadcast, without CUDA
    (fault,) = launched.events("fault_injected", role="rank")
    assert (fault["type"], fault["cycle"]) == ("rank_hung", 0)
    planned, fired = re.findall(r"FT: SIMULATED FAULT: (.*)", finished.err)
    assert planned == f"planned: rank {fault['rank']} is stopped (SIGSTOP) in {planned.split()[-3]} s (rank_hung)"
    assert fired == f"rank {fault['rank']} is stopped (SIGSTOP) after iteration {fault['iteration']} of cycle 0"
    (first, last) = launched.events("cycle_ended")
    assert first["cause"]["rank"] == fault["rank"]
    assert first["cause"]["kind"] == "hang"
    assert "process stopped" in first["cause"]["text"]
    assert last["outcome"] == "succeeded"

    # between the announcement of the fault and its stroke some steps may be done; the board has the last one
    assert fault["iteration"] <= first["iteration"]
    # it resumed at a checkpoint (a stopped rank is continued to write its stack, and may get as far as another one
    # before it is ended); the iterations are args.curr_iteration
    starts = {(e["cycle"], e["rank"]): e["iteration"] for e in launched.events("first_iteration", role="monitor")}
    begins = {
        int(cycle): int(at) for cycle, at in re.findall(r"^cycle (\d) begins at (\d+)$", finished.out, re.MULTILINE)
    }
    assert starts == {(cycle, rank): at for cycle, at in begins.items() for rank in range(2)}
    assert begins[0] == 0
    assert begins[1] >= first["iteration"] // 10 * 10 > 0

    document = json.loads((tmp_path / "save" / "ft_state.json").read_text())
    assert set(document["sections"]) == {"setup", "step", "checkpointing"}
    assert document["out_of_section"]["calculated_s"] > 0
