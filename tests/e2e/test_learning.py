"""Jobs whose hooks must not harm them: nothing configured, ranks that step unequally, stalls, doubled timeouts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.launching import Launcher

pytestmark = pytest.mark.waits
IMPORTED_BEFORE = ()  # torch is enough

TWO = ("--nproc-per-node", "2")
BEGIN = """
import torch, torch.distributed as dist
from megatron_ft import fault_tolerance as ft
dist.init_process_group("gloo")
state = ft.GlobalState.create(save=sys.argv[1], ft=ft.FaultToleranceSettings(calc_ft_timeouts={learns}))
counted = []
def sum_of(n):
    values = torch.full((n,), 1.0)
    dist.all_reduce(values)
    counted.append(n)
    assert bool((values == dist.get_world_size()).all()), "the sum of another collective"
def save():
    ft.on_checkpointing_start(state)
    ft.on_checkpointing_end(is_async_finalization=False, global_state=state)
{rest}
ft.setup(state.cfg, state)
{loop}
ft.shutdown(state)
issued = dist.distributed_c10d._get_default_group()._get_sequence_number_for_group()
say("rank", RANK, "issued", issued - len(counted))
dist.destroy_process_group()
"""


def script(loop: str, *, learns: bool = False, rest: str = "") -> str:
    return BEGIN.format(loop=loop, learns=learns, rest=rest)


STEPS = """
for step in range({steps}):
    state.train_state.step = step
    ft.on_training_step_start(state)
    if RANK == 0 and step == {slow}:
        time.sleep({seconds})
    sum_of(8)
    time.sleep(0.01)
    ft.on_training_step_end(state)
    {after}
"""


def steps(*, steps: int, slow: int = -1, seconds: float = 0.0, after: str = "pass") -> str:
    return STEPS.format(steps=steps, slow=slow, seconds=seconds, after=after)


SOON = "--ft-workload-check-interval=0.2"
"""Monitors notice milestones before the stall, which would count as observed."""


def test_stall_with_nothing_configured_is_reported_once_and_the_run_goes_on(launcher: Launcher, tmp_path: Path) -> None:
    loop = steps(steps=70, slow=60, seconds=9).replace("time.sleep(0.01)", "time.sleep(0.05)")
    launched = launcher.start(script(loop), *TWO, SOON, script_args=[str(tmp_path / "save")])
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert len(launched.events("cycle_started")) == 1
    assert launched.events("signalled", role="monitor") == []
    (line,) = [line for line in finished.lines if "would be a hang" in line]
    assert re.search(r"would be a hang: rank 0 in 'step' for \d+\.\d s", line), line
    assert line.endswith("set timeouts or --ft-learn on to restart"), line
    assert "no timeouts configured: hangs are reported, not killed" in finished.err
    assert list((launched.log_dir / "evidence").glob("*/*.json"))
    assert list((tmp_path / "save").iterdir()) == []


UNEQUAL = {
    "a rank skips a step": steps(steps=40).replace(
        "    sum_of(8)", "    sum_of(8)\n    if RANK and step == 9: continue"
    ),
    "rank 0 saves alone": steps(steps=45, after="if RANK == 0 and step in (10, 20): save()"),
    "rank 0 evaluates alone": steps(
        steps=40, after="if RANK == 0 and step == 33: [(ft.on_eval_step_start(state), ft.on_eval_step_end(state))]"
    ),
    "rank 0 loads alone": "if RANK == 0: ft.on_checkpoint_loaded(is_local_chkpt=False, global_state=state)"
    + steps(steps=30, after="if step in (18, 25): save()"),
}


@pytest.mark.parametrize("learns", [False, True])
def test_hooks_called_unequally_by_ranks_issue_no_collective(learns: bool, launcher: Launcher, tmp_path: Path) -> None:
    loops = "\n".join(UNEQUAL.values())
    finished = launcher.run(script(loops, learns=learns), *TWO, script_args=[str(tmp_path / "save")])
    assert finished.code == 0, finished.err
    assert re.findall(r"^rank \d issued (\d+)$", finished.out, re.MULTILINE) == ["0", "0"], finished.out


def test_rank_late_at_setup_is_waited_for_by_the_others_as_long_as_setup_may_take(
    launcher: Launcher, tmp_path: Path
) -> None:
    late = script(steps(steps=3), rest="if RANK == 0: time.sleep(3)")
    timeouts = ("--ft-rank-section-timeouts=setup:60,step:60", "--ft-rank-out-of-section-timeout=1")
    finished = launcher.run(late, *TWO, *timeouts, script_args=[str(tmp_path / "save")])
    assert finished.code == 0, finished.err


FLOOR = "--ft-learned-floor=5"


def test_step_that_is_slow_in_every_cycle_costs_two_restarts(launcher: Launcher, tmp_path: Path) -> None:
    loop = steps(steps=60, slow=50, seconds=9, after="if step % 20 == 19: save()")
    launched = launcher.start(
        script(loop, learns=True), *TWO, FLOOR, "--max-restarts=3", script_args=[str(tmp_path / "save")]
    )
    finished = launched.wait(120)
    assert finished.code == 0, finished.err
    kills = len(launched.events("cycle_started")) - 1
    assert kills == 2 or "although ranks made progress" in finished.err  # a busy machine keeps them waiting for a CPU
    assert len(re.findall(r"\(learned timeout [\d.]+ s\)", finished.err)) >= kills
    (told,) = re.findall(
        r"the timeout of 'step' terminated a rank .*: it is ([\d.]+) s now, was ([\d.]+) s", finished.err
    )
    assert float(told[0]) == pytest.approx(2 * float(told[1]), rel=0.01)


OUT_OF_SECTION = (
    steps(steps=20)
    + """
save()
time.sleep(float(sys.argv[2]))
say("shows", state.rank_monitor_client.section_timeouts.section["step"])
"""
)


def test_time_out_of_section_that_is_open_at_the_end_is_what_the_next_run_may_take(
    launcher: Launcher, tmp_path: Path
) -> None:
    loop = script(f"ft.on_checkpoint_loaded(is_local_chkpt=False, global_state=state)\n{OUT_OF_SECTION}", learns=True)
    options = (*TWO, "--ft-learned-floor=0.1", "--ft-rank-section-timeouts=step:180", "--max-restarts=0")
    for seconds in ("2", "3.5"):
        finished = launcher.run(loop, *options, script_args=[str(tmp_path / "save"), seconds])
        assert finished.code == 0, finished.err
        assert 0.1 <= float(re.findall(r"^shows (\S+)$", finished.out, re.MULTILINE)[0]) < 180.0, "as learned"
    timeouts = json.loads((tmp_path / "save" / "ft_state.json").read_text())["timeouts"]
    assert 5 * (2 + 3.5) / 2 <= timeouts["out_of_section"] < 5 * 10.0


def test_run_that_is_aborted_or_fails_learns_no_time_out_of_section(launcher: Launcher, tmp_path: Path) -> None:
    loop = f"""
ft.on_checkpoint_loaded(is_local_chkpt=False, global_state=state)
try:
{re.sub("^", "    ", steps(steps=40, after="save() if step == 20 else None"), flags=re.MULTILINE)}
    while not os.path.exists(os.path.join(sys.argv[1], "ft_state.json")):
        time.sleep(0.01)
    raise RuntimeError("no memory")
finally:
    ft.shutdown(state)
"""
    launched = launcher.start(script(loop, learns=True), *TWO, "--max-restarts=0", script_args=[str(tmp_path / "save")])
    finished = launched.wait(60)
    assert finished.code == 1
    assert "RuntimeError: no memory" in finished.err
    document = json.loads((tmp_path / "save" / "ft_state.json").read_text())
    assert not document["current_timeouts"]["section"]["is_out_of_section_calculated"]
