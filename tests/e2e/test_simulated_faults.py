"""Every fault that can be rehearsed fires in a real rank, and the system makes of it what it should.

Several to a launch, one in each cycle: a script that only steps and saves, with two ranks that don't need each other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_ft.core.facts.all_kinds import RECORDS
from megatron_ft.core.facts.rank import not_fired
from megatron_ft.core.fault_plan import FAULT_TYPES, resolve
from megatron_ft.ipc.config.fault_plan_file import read_fault_plan
from tests.support import more_faults
from tests.support.launching import Launched, Launcher, launcher

__all__ = ["launcher"]
IMPORTED_BEFORE = ()  # torch is enough

TWO = ("--nproc-per-node", "2")
STEP_TIMEOUT_S = 4.0
OPTIONS = (f"--ft-rank-section-timeouts=setup:60,step:{STEP_TIMEOUT_S},checkpointing:60",)
LOOP = """
from megatron_ft import fault_tolerance as ft
from megatron_ft.rank.faults.injection import FaultInjector
from tests.support import more_faults

more_faults.install(save_dir=sys.argv[1])
save, plan, steps = sys.argv[1], sys.argv[2], 8
state = ft.GlobalState.create(save=save, ft=ft.FaultToleranceSettings())
ft.setup(state.cfg, state)
client = state.rank_monitor_client
injector = FaultInjector.from_plan_file(plan, rank=RANK, world_size=2, cycle=CYCLE, client=client)
for state.train_state.step in range(steps):
    ft.on_training_step_start(state)
    injector.on_iteration(state.train_state.step)
    time.sleep(0.01)
    ft.on_training_step_end(state)
    if state.train_state.step == steps - 2:
        ft.on_checkpointing_start(state)
        with open(os.path.join(save, f"rank-{RANK}"), "w") as file:
            file.write(str(CYCLE))
        ft.on_checkpointing_end(is_async_finalization=False, global_state=state)
# the fault was the other rank's, who may not have come to it yet
while any(fault.cycle == CYCLE + 1 for fault in injector.pending()):
    time.sleep(0.1)
ft.shutdown(state)
"""
WITH_TORCH = """
import torch, torch.distributed as dist
from megatron_ft import fault_tolerance as ft
from megatron_ft.rank.faults.injection import FaultInjector
from tests.support import more_faults

more_faults.install()
plan = sys.argv[2]
dist.init_process_group("gloo")
state = ft.GlobalState.create(save=sys.argv[1], ft=ft.FaultToleranceSettings())
ft.setup(state.cfg, state)
client = state.rank_monitor_client
injector = FaultInjector.from_plan_file(plan, rank=RANK, world_size=2, cycle=CYCLE, client=client)
dist.barrier()
for state.train_state.step in range(5):
    ft.on_training_step_start(state)
    injector.on_iteration(state.train_state.step)
    dist.all_reduce(torch.ones(1000))
    ft.on_training_step_end(state)
ft.shutdown(state)
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Case:
    """A fault, and what the launcher's line says of it; ``None``: nothing ends."""

    type: str
    line: str | None
    more: str = ""


HUNG = r"hung in 'step' for \d+\.\d s \(timeout 4\.0 s\)"
CASES = [
    Case("rank_killed", r"killed by SIGKILL \(not sent by ft_launcher\)"),
    Case("rank_hung", r"hung in 'step' for \d+\.\d s \(timeout 4\.0 s, process stopped\)"),
    Case("sleep", HUNG),
    Case("spin", HUNG),
    Case("gil", HUNG),
    Case("exception", r"raised InjectedFault: simulated fault"),
    Case("exit", r"exited with code 3"),
    Case("segfault", r"crashed with SIGSEGV"),
    Case("sigterm", r"killed by SIGTERM \(not sent by ft_launcher\)"),
    Case("disk_full", r"raised OSError: \[Errno 28\] No space left on device \(simulated\): .*"),
    Case("slow", None, ", seconds: 0.3"),
]


def write_plan(path: Path, cases: list[Case]) -> Path:
    lines = [
        f"  - {{cycle: {cycle}, rank: {cycle % 2}, iteration: 3, type: {case.type}{case.more}}}\n"
        for cycle, case in enumerate(cases)
    ]
    path.write_text("faults:\n" + "".join(lines))
    return path


def assert_all_fired(launched: Launched, plan: Path) -> None:
    """Each was announced loudly and recorded, once, and nothing else was."""
    with pytest.MonkeyPatch.context() as patched:  # other tests of this process know only the package's faults
        for name, what in more_faults.TYPES.items():
            patched.setitem(FAULT_TYPES, name, what)
        planned = resolve(read_fault_plan(plan), 2)
        said = re.findall(r"FT: SIMULATED FAULT: (.*)", launched.err)
        assert sorted(said) == sorted(fault.describe() for fault in planned)
    fired = launched.events("fault_injected", role="rank")
    assert not_fired(planned, map(RECORDS.parse, fired)) == [], launched.err
    assert len(fired) == len(planned)


def test_every_fault_fires_and_is_dealt_with(launcher: Launcher, tmp_path: Path) -> None:
    plan, save = write_plan(tmp_path / "plan.yaml", CASES), tmp_path / "save"
    save.mkdir()  # the ranks don't wait for each other, and only rank 0 would make it
    launched = launcher.start(
        LOOP, *TWO, "--max-restarts=20", "--ft-max-no-progress-cycles=0", *OPTIONS, script_args=[str(save), str(plan)]
    )
    finished = launched.wait(115)
    assert finished.code == 0, finished.err
    assert_all_fired(launched, plan)

    ended = {event["cycle"]: event for event in launched.events("cycle_ended")}
    assert sorted(ended) == list(range(len(CASES)))
    for cycle, case in enumerate(CASES):
        if case.line is None:
            assert ended[cycle]["outcome"] == "succeeded"
            continue
        rank = cycle % 2
        # "disk_full" fires at iteration 3, and is felt when the rank saves, at iteration 6
        iteration = 6 if case.type == "disk_full" else 3
        line = (
            rf"cycle {cycle} ended: rank {rank} {case.line} after iteration {iteration}"
            r"(, in (script|more_faults)\.py:.*)?; "
            rf"restarting as cycle {cycle + 1}"
        )
        assert re.search(line, finished.err), (line, finished.err)
        assert ended[cycle]["cause"]["rank"] == rank
    assert "OSError: [Errno 28] No space left on device (simulated)" in finished.err

    # a hang is noticed when the timeout is over, and never before; the slow rank of the last cycle isn't hung
    verdicts = launched.events("verdict", role="monitor")
    assert {verdict["cycle"] for verdict in verdicts} == {1, 2, 3, 4}
    assert all(verdict["elapsed_s"] >= STEP_TIMEOUT_S for verdict in verdicts)
    last = len(CASES) - 1
    (slow,) = [e for e in launched.events("fault_injected", role="rank") if e["type"] == "slow"]
    (gone,) = [e for e in launched.events("rank_exited") if (e["cycle"], e["rank"]) == (last, slow["rank"])]
    assert (gone["t"] - slow["t"]) / 1e9 >= 5 * 0.3, "iterations 3 to 7 are slow"


def test_a_stuck_collective_hangs_all_and_ends(launcher: Launcher, tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.yaml", [Case("stuck_collective", "")])
    launched = launcher.start(
        WITH_TORCH, *TWO, "--max-restarts=1", *OPTIONS, script_args=[str(tmp_path / "save"), str(plan)]
    )
    finished = launched.wait(115)
    assert finished.code == 0, finished.err
    assert_all_fired(launched, plan)
    # both ranks wait for each other, so neither is blamed
    seen = (
        rf"cycle 0 ended: hang detected \(first on rank [01]: {HUNG}\) after iteration 3, "
        "root cause"
    )
    assert re.search(
        rf"{seen} undetermined; candidates: rank 0 in .*; rank 1 in .*; restarting as cycle 1", finished.err
    )
    failed, succeeded = launched.events("cycle_ended")
    assert (failed["cause"]["kind"], failed["cause"]["rank"]) == ("hang", None)
    assert succeeded["outcome"] == "succeeded"


def test_every_type_is_rehearsed() -> None:
    assert {case.type for case in CASES} | {"stuck_collective"} == set(FAULT_TYPES) | set(more_faults.TYPES)
