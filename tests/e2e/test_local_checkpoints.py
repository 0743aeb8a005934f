"""A script with nvidia-resiliency-ext's local checkpoints, under our launcher: its states are in memory."""

from __future__ import annotations

from tests.support.extras import skip_module_without
from tests.support.launching import Launcher

skip_module_without("xxhash")

SCRIPT = """
import signal, sys
import torch, torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

class State(TensorAwareStateDict):
    def __init__(self, tensor): self.tensor = tensor
    def copy_tensors_to_cpu(self, non_blocking=False): pass
    def restore_tensor_device(self, non_blocking=True): pass
    pop_tensors = tensors = is_hollow = insert_tensors = init_tensors = None

dist.init_process_group("gloo")
manager = LocalCheckpointManager("files", repl_strategy=None)
first = manager.find_latest()
weight = torch.zeros(4) if first == -1 else manager.load()[0].tensor
if first == -1:
    first = 0
say("rank", RANK, "begins cycle", CYCLE, "at", first, weight.tolist()[0])
for iteration in range(first + 1, 7):
    weight += iteration
    manager.save(State(weight.clone()), iteration)
    assert manager.find_latest() == iteration
    if CYCLE == 0 and RANK == 1 and iteration == 4:
        os.kill(os.getpid(), signal.SIGKILL)
say("rank", RANK, "ends with", weight.tolist()[0], os.path.exists("files"))
dist.destroy_process_group()
"""
TWO = ("--nproc-per-node=2", "--max-restarts=1")


def test_killed_rank_goes_on_from_memory_under_the_names_of_the_reference(launcher: Launcher) -> None:
    ended = launcher.run(SCRIPT, *TWO)
    assert ended.code == 0, ended.err
    for rank in (0, 1):
        assert f"rank {rank} begins cycle 0 at 0 0.0" in ended.out
        assert f"rank {rank} begins cycle 1 at 4 10.0" in ended.out
        assert f"rank {rank} ends with 21.0 False" in ended.out
    assert "restored iteration 4 from memory" in ended.err
    assert ended.err.count("FT: local checkpoints are kept in the nodes' memory, not in files") == 1
