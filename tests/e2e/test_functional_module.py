"""The functional module in real ranks, under the launcher: planned faults, learned timeouts, a bad save directory."""

from __future__ import annotations

import json
import re
from pathlib import Path

from megatron_ft.rank.faults.plan import FAULT_TYPES, read_fault_plan
from tests.support.launching import Launcher

TWO = ("--nproc-per-node", "2")
LOOP = """
import torch, torch.distributed as dist
from megatron_ft import fault_tolerance as ft
from megatron_ft.rank.faults.injection import FaultInjector

save, plan, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo")
settings = ft.FaultToleranceSettings(calc_ft_timeouts=True)
state = ft.GlobalState.create(save=save, ft=settings)
ft.setup(state.cfg, state)
client = state.rank_monitor_client
injector = FaultInjector.of_this_rank(plan, client=client)
checkpoint = os.path.join(save, "iteration")
iteration = int(open(checkpoint).read()) if os.path.exists(checkpoint) else 0
if iteration:
    ft.on_checkpoint_loaded(is_local_chkpt=False, global_state=state)
dist.barrier()
while iteration < steps:
    state.train_state.step = iteration
    ft.on_training_step_start(state)
    injector.on_iteration(iteration)
    dist.all_reduce(torch.ones(4))
    time.sleep(0.005)
    ft.on_training_step_end(state)
    iteration += 1
    if iteration % 10 == 0:
        ft.on_checkpointing_start(state)
        if RANK == 0:
            open(checkpoint, "w").write(str(iteration))
        dist.barrier()
        ft.on_checkpointing_end(is_async_finalization=False, global_state=state)
assert not injector._pending, injector._pending
ft.shutdown(state)
ft.on_training_step_start(state)
dist.destroy_process_group()
"""
PLAN = """
seed: 3
faults:
  - {cycle: 0, rank: random, iteration: [12, 18], type: rank_killed}
  - {cycle: 1, rank: 0, iteration: 25, type: rank_hung}
  - {cycle: 2, rank: 1, iteration: 35, type: exception}
  - {cycle: 3, rank: 0, iteration: 45, type: slow, seconds: 0.3}
"""
ENDS = (
    r"killed by SIGKILL \(not sent by ft_launcher\)",
    r"hung in 'step' for .*process stopped\)",
    "raised InjectedFault:",
)
NO_FAULTS = "faults: []\n"
OPTIONS = (
    "--ft-rank-section-timeouts=setup:60,step:4,checkpointing:60",
    "--ft-rank-out-of-section-timeout=60",
    "--ft-learned-floor=4",
)
FLOOR_S = {"setup": 16.0, "step": 4.0, "checkpointing": 4.0, "out_of_section": 4.0}


def test_run_with_faults_restarts_and_the_next_run_uses_its_timeouts(launcher: Launcher, tmp_path: Path) -> None:
    save, plan, no_faults = tmp_path / "save", tmp_path / "plan.yaml", tmp_path / "none.yaml"
    plan.write_text(PLAN)
    no_faults.write_text(NO_FAULTS)
    first = launcher.start(LOOP, *TWO, "--max-restarts=3", *OPTIONS, script_args=[str(save), str(plan), "50"])
    finished = first.wait()
    assert finished.code == 0, finished.err
    assert "WARNING" not in finished.err
    faults = read_fault_plan(plan, 2)
    parts = ("cycle", "rank", "iteration", "type")
    fired = {tuple(event.get(part) for part in parts) for event in first.events("fault_injected", role="rank")}
    assert fired >= {tuple(getattr(fault, part) for part in parts) for fault in faults}
    assert {fault.type for fault in faults} == set(FAULT_TYPES)
    # each was announced loudly and recorded, once, and nothing else was
    said = re.findall(r"FT: SIMULATED FAULT: (.*)", finished.err)
    assert (sorted(said), len(fired)) == (sorted(fault.describe() for fault in faults), len(faults))
    causes = [(event["cause"] or {}).get("rank") for event in first.events("cycle_ended")]
    assert causes == [faults[0].rank, 0, 1, None]
    for cycle, (text, fault) in enumerate(zip(ENDS, faults, strict=False)):
        line = (
            rf"cycle {cycle} ended: rank {fault.rank} {text}.* after iteration {fault.iteration}(, in .*)?; restarting"
        )
        assert re.search(line, finished.err), (line, finished.err)
    # a hang is noticed when the timeout is over, and never before; the slow rank of the last cycle isn't hung
    verdicts = first.events("verdict", role="monitor")
    assert {verdict["cycle"] for verdict in verdicts} == {1}
    assert all(verdict["elapsed_s"] >= FLOOR_S["step"] for verdict in verdicts)
    (slow,) = [event for event in first.events("fault_injected", role="rank") if event["type"] == "slow"]
    (gone,) = [event for event in first.events("rank_exited") if (event["cycle"], event["rank"]) == (3, 0)]
    assert (gone["t"] - slow["t"]) / 1e9 >= 5 * 0.3, "iterations 45 to 49 are slow"

    # this run resumed, so everything was learned, and both ranks' monitors had it in force at the end
    document = json.loads((save / "ft_state.json").read_text())
    assert set(document["timeouts"]) == set(FLOOR_S)
    learned = {name: max(timeout_s, FLOOR_S[name]) for name, timeout_s in document["timeouts"].items()}
    out_of_section = learned.pop("out_of_section")

    # the next run begins with them; its monitors have them within its first iterations
    second = launcher.start(LOOP, *TWO, *OPTIONS, script_args=[str(save), str(no_faults), "150"])
    finished = second.wait()
    assert finished.code == 0, finished.err
    loaded = second.events("timeouts", role="monitor")
    for rank in (0, 1):
        assert any(
            event["rank"] == rank and event["sections"] == learned and event["out_of_section"] == out_of_section
            for event in loaded
        ), loaded


WITHIN = """
import subprocess
from megatron_ft import fault_tolerance as ft
inner = "INNER" in os.environ
state = ft.GlobalState.create(save=sys.argv[1], ft=ft.FaultToleranceSettings())
ft.setup(state.cfg, state)
assert (state.rank_monitor_client is None) == inner
for state.train_state.step in range(3):
    ft.on_training_step_start(state)
    if RANK == 0 and state.train_state.step == 1 and not inner:
        options = ["--nproc-per-node=2", "--master-port=0", f"--log-dir={sys.argv[1]}"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, *sys.argv]
        subprocess.run(command, env={**os.environ, "INNER": "1"}, check=True)
    ft.on_training_step_end(state)
ft.shutdown(state)
say("inner" if inner else "outer", RANK, "is done")
"""


def test_ranks_of_a_torchrun_within_a_rank_are_not_watched_and_do_not_take_its_place(
    launcher: Launcher, tmp_path: Path
) -> None:
    timeouts = "--ft-rank-section-timeouts=setup:60,step:60"
    job = launcher.run(WITHIN, *TWO, "--max-restarts=0", timeouts, script_args=[str(tmp_path / "save")])
    assert job.code == 0, job.err
    assert sorted(job.out.split("\n"))[1:] == [
        f"{name} {rank} is done" for name in ("inner", "outer") for rank in (0, 1)
    ]
    assert job.err.count("another launcher has started this process within a rank") == 1
    assert "refused" not in job.err
    assert sorted(event["rank"] for event in launcher.launches[0].events("attached")) == [0, 1]
