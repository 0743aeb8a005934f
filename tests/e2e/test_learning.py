"""Jobs whose hooks must not harm them: ranks that step unequally, stall, compute, or wait for a file system."""

from __future__ import annotations

import ctypes
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.launching import Finished, Launcher, wait_until
from tests.support.nodes import meeting_place

_MNT_DETACH = 2

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
        {act}
    sum_of(8)
    time.sleep({each_s})
    ft.on_training_step_end(state)
    {after}
"""
SAVES = "if step % 20 == 19: save()"


def steps(steps: int, *, slow: int = -1, act: str = "pass", each_s: float = 0.01, after: str = "pass") -> str:
    """Steps of all ranks; ``act``: what rank 0 does in the one that is slow."""
    return STEPS.format(steps=steps, slow=slow, act=act, each_s=each_s, after=after)


SOON = "--ft-workload-check-interval=0.2"
"""Monitors notice milestones before the stall, which would count as observed."""


UNEQUAL = [
    steps(40).replace("    sum_of(8)", "    sum_of(8)\n    if RANK and step == 9: continue"),
    steps(45, after="if RANK == 0 and step in (10, 20): save()"),
    steps(40, after="if RANK == 0 and step == 33: [(ft.on_eval_step_start(state), ft.on_eval_step_end(state))]"),
    "if RANK == 0: ft.on_checkpoint_loaded(is_local_chkpt=False, global_state=state)",
    steps(30, after="if step in (18, 25): save()"),
]
"""Rank 0 skips a hook, saves, evaluates and loads alone."""


def issues_no_collective(finished: Finished) -> bool:
    return re.findall(r"^rank \d issued (\d+)$", finished.out, re.MULTILINE) == ["0", "0"]


@pytest.mark.waits
def test_stall_with_nothing_configured_is_reported_once_and_the_run_goes_on(launcher: Launcher, tmp_path: Path) -> None:
    loop = "\n".join([*UNEQUAL, steps(70, slow=60, act="time.sleep(9)", each_s=0.05)])
    launched = launcher.start(script(loop), *TWO, SOON, script_args=[str(tmp_path / "save")])
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert issues_no_collective(finished), finished.out
    assert len(launched.events("cycle_started")) == 1
    assert launched.events("signalled", role="monitor") == []
    (line,) = [line for line in finished.lines if "would be a hang" in line]
    assert re.search(r"would be a hang: rank 0 in 'step' for \d+\.\d s", line), line
    assert line.endswith("set timeouts or --ft-learn on to restart"), line
    assert "no timeouts configured: hangs are reported, not killed" in finished.err
    assert list((launched.log_dir / "evidence").glob("*/*.json"))
    assert list((tmp_path / "save").iterdir()) == []


FLOOR = "--ft-learned-floor=5"


OUT_OF_SECTION = f"""
ft.on_checkpoint_loaded(is_local_chkpt=False, global_state=state)
{steps(20)}
save()
time.sleep(float(sys.argv[2]))
say("shows", state.rank_monitor_client.section_timeouts.section["step"])
"""


@pytest.mark.waits
def test_time_out_of_section_that_is_open_at_the_end_is_what_the_next_run_may_take(
    launcher: Launcher, tmp_path: Path
) -> None:
    loop = script("\n".join([*UNEQUAL, OUT_OF_SECTION]), learns=True)
    options = (*TWO, "--ft-learned-floor=0.1", "--ft-rank-section-timeouts=step:180", "--max-restarts=0")
    finished = launcher.run(loop, *options, script_args=[str(tmp_path / "save"), "2"])
    assert finished.code == 0, finished.err
    assert issues_no_collective(finished), finished.out
    assert 0.1 <= float(re.findall(r"^shows (\S+)$", finished.out, re.MULTILINE)[0]) < 180.0, "as learned"
    timeouts = json.loads((tmp_path / "save" / "ft_state.json").read_text())["timeouts"]
    assert 5 * 2 <= timeouts["out_of_section"] < 5 * 10.0


@pytest.mark.waits
def test_run_that_is_aborted_or_fails_learns_no_time_out_of_section(launcher: Launcher, tmp_path: Path) -> None:
    loop = f"""
ft.on_checkpoint_loaded(is_local_chkpt=False, global_state=state)
try:
{re.sub("^", "    ", steps(40, after="save() if step == 20 else None"), flags=re.MULTILINE)}
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


COMPUTE = """
def half():
    for _ in range(2000):
        pass

def other_half():
    for _ in range(2000):
        pass

def compute(until_s):
    while time.monotonic() < until_s:
        half()
        other_half()
"""


def test_step_that_computes_for_longer_than_ever_ends_nobody_here_or_on_another_node(
    launcher: Launcher, tmp_path: Path
) -> None:
    loop = steps(60, slow=50, act="compute(time.monotonic() + 6.5)", after=SAVES)
    options = (FLOOR, *meeting_place("--nnodes=2"))
    text, arguments = script(loop, learns=True, rest=COMPUTE), [str(tmp_path / "save")]
    nodes = [launcher.start(text, *options, script_args=arguments) for _ in range(2)]
    ended = [node.wait() for node in nodes]
    assert [finished.code for finished in ended] == [0, 0], [finished.err for finished in ended]
    assert [node.events("verdict", role="monitor") for node in nodes] == [[], []]
    assert [len(node.events("cycle_ended")) for node in nodes] == [1, 1]
    given = [each for node in nodes for each in node.events("more_time")]
    assert {each["verdict"]["section"] for each in given} == {"step"}
    assert all(each["until_s"] <= 4 * each["verdict"]["timeout_s"] for each in given)
    first = next(
        each for each in given if each["verdict"]["rank"] == 1
    )  # a later one may be after the end of the long step
    assert first["progress"].startswith("rank 0 computes")
    said = next(finished.err for finished in ended if "longer than its learned timeout of" in finished.err)
    assert "s, but rank 0 computes in script.py" in said
    assert "extending the timeout, to at most" in said


@pytest.fixture
def dead_directory(tmp_path: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A mounted file system whose server never answers, and what ends all waits for it."""
    place = tmp_path / "dead"
    place.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        server = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"no file system can be made here that never answers: {error}")
    options = f"fd={server},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    if libc.mount(b"dead", os.fsencode(place), b"fuse", 0, options.encode()):
        os.close(server)
        pytest.skip(f"no file system can be made here that never answers: {os.strerror(ctypes.get_errno())}")
    ended = []

    def end() -> None:
        ended.extend([] if ended else [os.close(server)])

    yield place, end
    end()
    libc.umount2(os.fsencode(place), _MNT_DETACH)


WAIT_FOR_FILE = """
def wait_for_file(folder):
    open(folder + ".tried", "w").close()
    try:
        open(folder + "/file")
    except OSError:  # it is given up at last
        pass
"""


def test_step_that_waits_for_a_file_system_ends_nobody(
    launcher: Launcher, tmp_path: Path, dead_directory: tuple[Path, Callable[[], None]]
) -> None:
    place, end = dead_directory
    loop = steps(60, slow=50, act="wait_for_file(sys.argv[2])", after=SAVES)
    text, arguments = script(loop, learns=True, rest=WAIT_FOR_FILE), [str(tmp_path / "save"), str(place)]
    launched = launcher.start(text, FLOOR, script_args=arguments)
    wait_until(Path(f"{place}.tried").exists, 60)
    wait_until(lambda: launched.events("more_time"), 30)
    time.sleep(0.5)  # beyond the learned timeout: there is no condition to wait for
    end()
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert launched.events("verdict", role="monitor") == []
    given = launched.events("more_time")
    assert {each["verdict"]["section"] for each in given} == {"step"}
    assert given[0]["progress"].startswith("rank 0 waits for its file system (in fuse_")
