"""The rerun state machine of megatron-core in real ranks: its exit codes 16 and 17, and what follows from them."""

from __future__ import annotations

import json

from tests import ROOT
from tests.support.launching import Launcher

# In the order of Megatron-LM's training.py: re-run, save, shut monitoring down, exit with the code.
LOOP = """
import importlib, itertools, pickle
import torch, torch.distributed as dist
sys.path.insert(0, EXAMPLES)
import cpu_stand_in
cpu_stand_in.install()
from megatron.core.rerun_state_machine import *
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from megatron_ft import RankMonitorClient

GPU = int(os.environ.get("GPU", os.environ["LOCAL_RANK"]))
torch.cuda.current_device = lambda: GPU
dist.init_process_group("gloo")
client = RankMonitorClient()
client.init_workload_monitoring()
initialize_rerun_state_machine(mode=RerunMode("validate_results"))
machine, saved = get_rerun_state_machine(), f"{DIRECTORY}/saved_{RANK}"
if os.path.exists(saved):
    with open(saved, "rb") as file:
        machine.load_state_dict(pickle.load(file))
say("cycle", CYCLE, "rank", RANK, "on GPU", GPU)
code, iteration, calls = 0, machine.current_iteration + 1, 0
while not code and iteration < 6:
    client.set_iteration(iteration)
    while machine.should_run_forward_backward(None):
        calls += 1
        wrong = iteration >= 3 and RANK == 1 and WRONG
        machine.validate_result(torch.tensor(9.0 if wrong else 1.0), lambda loss: bool(loss > 5), "spiky loss")
    should_checkpoint, should_exit, code = machine.should_checkpoint_and_exit()
    if should_checkpoint and code == 16:  # with 17 newer versions save none, and no version can resume from that
        state = machine.state_dict(None, "torch_dist")
        state["sharded"] = state["sharded"].data
        with open(saved, "wb") as file:
            pickle.dump(state, file)
    iteration += 1
client.shutdown_workload_monitoring()
time.sleep(LATER * RANK)
sys.exit(code)
"""
ASKS = "rank 1 asks to re-run from the checkpoint on another GPU (Megatron exit code 16)"


def loop(launcher: Launcher, *, wrong: str, later: float = 0.0) -> str:
    """A script for one launch. ``wrong``: when the result of rank 1 is wrong from iteration 3 on."""
    directory = launcher.directory / f"checkpoint{len(launcher.launches)}"
    directory.mkdir(exist_ok=True)
    given = {"EXAMPLES": str(ROOT / "examples"), "DIRECTORY": str(directory), "LATER": later}
    return "".join(f"{name} = {value!r}\n" for name, value in given.items()) + LOOP.replace("WRONG", wrong)


def test_another_gpu_re_runs_the_rank_and_the_conclusion_ends_the_job(launcher: Launcher) -> None:
    script = loop(launcher, wrong="GPU == 1", later=0.3)
    launched = launcher.start(script, "--nproc-per-node=2", "--max-restarts=9")
    finished = launched.wait()
    launched.assert_nothing_left()
    assert finished.code == 93
    assert set(finished.out.split("\n")) >= {f"cycle 1 rank {rank} on GPU {1 - rank}" for rank in (0, 1)}
    ends = [line for line in finished.lines if " ended: " in line]
    assert ends[0] == (
        f"cycle 0 ended: {ASKS} after iteration 3: ranks are rotated by one within each node; "
        "restarting as cycle 1, 8 of 9 restarts left"
    )
    assert ends[1].startswith("cycle 1 ended: rank 1 has re-run a rejected result of GPU 1 on ")
    assert "not restarting, because the checkpoint repeats this re-run" in ends[1]
    assert "Possible persistent error!" in finished.err
    assert [end[:3] for end in launched.ends()] == [(1, "request", "restart"), (1, "crash", "give_up")]
    # the one at fault ends later than the other, which must not be what kills it
    assert launched.exits(0) == {0: (16, False), 1: (16, False)}
    life = json.loads((launched.log_dir / "result.json").read_text())["lives"][0]
    assert (life["exit_code"], life["faults"]) == (93, [])
    assert "--rerun-mode disabled" in life["cause"]


def test_the_codes_of_another_program_mean_nothing(launcher: Launcher) -> None:
    # the module is imported, and its machine has nothing to say
    script = loop(launcher, wrong="False").replace("sys.exit(code)", "sys.exit([16, 17, 0][CYCLE])")
    launched = launcher.start(script, "--nproc-per-node=2", "--max-restarts=9")
    finished = launched.wait()
    assert finished.code == 0
    ended = [line for line in finished.lines if " ended: " in line]
    for line, code in zip(ended, (16, 17), strict=True):
        assert f"exited with code {code} after iteration 5" in line
        assert "rotated" not in line
    assert "cycle 2 rank 1 on GPU 1" in finished.out
    assert [end[1:3] for end in launched.ends()[:2]] == [("crash", "restart")] * 2
