"""A learned timeout that is over: it ends a rank that stands still, once, and none that makes progress."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.launching import Launcher, wait_until
from tests.support.nodes import meeting_place

IMPORTED_BEFORE = ()  # torch is enough

_MNT_DETACH = 2

# every 40th step takes far longer, also when the job comes to it again
LOOP = """
def half():
    for _ in range(2000):
        pass

def other_half():
    for _ in range(2000):
        pass

def computing(until_s):
    while time.monotonic() < until_s:
        half()
        other_half()

def take(seconds, how):
    if how.startswith("/"):
        open(how + ".tried", "w").close()
        try:
            open(how + "/file")
        except OSError:  # it is given up at last
            pass
    elif how == "computing":
        computing(time.monotonic() + seconds)
    else:
        time.sleep(seconds)

from megatron_ft import fault_tolerance as ft
save, slow_s, how = sys.argv[1], float(sys.argv[2]), sys.argv[3]
if how == "rank 1 computing":
    how = "computing" if RANK == 1 else "asleep"
settings = ft.FaultToleranceSettings(calc_ft_timeouts=True)
state = ft.GlobalState.create(save=save, ft=settings)
ft.setup(state.cfg, state)
checkpoint = os.path.join(save, "iteration")
iteration = int(open(checkpoint).read()) if os.path.exists(checkpoint) else 0
if iteration:
    ft.on_checkpoint_loaded(is_local_chkpt=False, global_state=state)
while iteration < 80:
    state.train_state.step = iteration
    ft.on_training_step_start(state)
    take(*((slow_s, how) if iteration % 40 == 35 else (0.02, "")))
    ft.on_training_step_end(state)
    iteration += 1
    if iteration % 30 == 0:
        ft.on_checkpointing_start(state)
        if RANK == 0:
            open(checkpoint, "w").write(str(iteration))
        ft.on_checkpointing_end(is_async_finalization=False, global_state=state)
ft.shutdown(state)
"""


OPTIONS = ("--max-restarts=5", "--ft-max-no-progress-cycles=1", "--ft-learned-floor=5")
SLOW = "6.5"
"""Seconds, more than the floor of learned timeouts."""


def test_a_step_that_computes_for_longer_than_ever_ends_nobody_here_or_on_another_node(
    launcher: Launcher, tmp_path: Path
) -> None:
    place = meeting_place("--nnodes=2")
    arguments = [str(tmp_path / "save"), SLOW, "rank 1 computing"]
    nodes = [launcher.start(LOOP, *OPTIONS, *place, script_args=arguments) for _ in range(2)]
    ended = [node.wait() for node in nodes]
    assert [finished.code for finished in ended] == [0, 0], [finished.err for finished in ended]
    assert [node.events("verdict", role="monitor") for node in nodes] == [[], []]
    assert [len(node.events("cycle_ended")) for node in nodes] == [1, 1]
    given = [each for node in nodes for each in node.events("more_time")]
    assert all(each["section"] == "step" and each["until_s"] <= 4 * each["timeout_s"] for each in given)
    first = next(each for each in given if each["rank"] == 0)  # a later one may be after the end of the long step
    assert first["progress"].startswith("rank 1 computes")
    said = next(finished.err for finished in ended if "longer than its learned timeout of" in finished.err)
    assert "s, but rank 1 computes in script.py" in said
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


def test_a_step_that_waits_for_a_file_system_ends_nobody(
    launcher: Launcher, tmp_path: Path, dead_directory: tuple[Path, Callable[[], None]]
) -> None:
    place, end = dead_directory
    launched = launcher.start(LOOP, *OPTIONS, script_args=[str(tmp_path / "save"), "0", str(place)])
    wait_until(Path(f"{place}.tried").exists, 60)
    wait_until(lambda: launched.events("more_time"), 30)
    time.sleep(0.5)  # beyond the learned timeout: there is no condition to wait for
    end()
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert launched.events("verdict", role="monitor") == []
    given = launched.events("more_time")
    assert {each["section"] for each in given} == {"step"}
    assert given[0]["progress"].startswith("rank 0 waits for its file system (in fuse_")
