"""Every fault that can be rehearsed fires in a real rank, and the system makes of it what it should.

Several to a launch, one in each cycle: a script that only steps and saves, with two ranks that don't need each other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.core.codec import Raw, encode
from megatron_ft.core.facts.all_kinds import RECORDS
from megatron_ft.core.facts.rank import not_fired
from megatron_ft.core.fault_plan import FAULT_TYPES, resolve
from megatron_ft.ipc.config.fault_plan_file import read_fault_plan
from tests.support.launching import Launched, Launcher, launcher

__all__ = ["launcher"]
IMPORTED_BEFORE = ()  # torch is enough

TWO = ("--nproc-per-node", "2")
STEP_TIMEOUT_S = 4.0
OPTIONS = (f"--ft-rank-section-timeouts=setup:60,step:{STEP_TIMEOUT_S},checkpointing:60",)
LOOP = """
from megatron_ft import fault_tolerance as ft
from megatron_ft.rank.faults.injection import FaultInjector

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


@dataclass(frozen=True)
class Case:
    """A fault, and what the launcher's line says of it; ``None``: nothing ends."""

    type: str
    line: str | None
    more: str = ""


CASES = [
    Case("rank_killed", r"killed by SIGKILL \(not sent by ft_launcher\)"),
    Case("rank_hung", r"hung in 'step' for \d+\.\d s \(timeout 4\.0 s, process stopped\)"),
    Case("exception", r"raised InjectedFault: simulated fault"),
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
    planned = resolve(read_fault_plan(plan), 2)
    said = re.findall(r"FT: SIMULATED FAULT: (.*)", launched.err)
    assert sorted(said) == sorted(fault.describe() for fault in planned)
    fired = launched.events("fault_injected", role="rank")
    assert not_fired(planned, map(RECORDS.parse, [Raw(event["ev"], encode(event)) for event in fired])) == [], (
        launched.err
    )
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
        line = rf"cycle {cycle} ended: rank {rank} {case.line} after iteration 3(, in .*)?; restarting"
        assert re.search(line, finished.err), (line, finished.err)
        assert ended[cycle]["cause"]["rank"] == rank

    # a hang is noticed when the timeout is over, and never before; the slow rank of the last cycle isn't hung
    verdicts = launched.events("verdict", role="monitor")
    assert {verdict["cycle"] for verdict in verdicts} == {1}
    assert all(verdict["elapsed_s"] >= STEP_TIMEOUT_S for verdict in verdicts)
    last = len(CASES) - 1
    (slow,) = [e for e in launched.events("fault_injected", role="rank") if e["type"] == "slow"]
    (gone,) = [e for e in launched.events("rank_exited") if (e["cycle"], e["rank"]) == (last, slow["rank"])]
    assert (gone["t"] - slow["t"]) / 1e9 >= 5 * 0.3, "iterations 3 to 7 are slow"


def test_every_type_is_rehearsed() -> None:
    assert {case.type for case in CASES} == set(FAULT_TYPES)
