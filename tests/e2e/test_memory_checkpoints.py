"""Memory checkpoints under `ft_launcher`: what survives the end of a rank, of the keeper, and of both."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.extras import skip_module_without
from tests.support.launching import START_S, Finished, Launched, Launcher, command_line, launcher, wait_until
from tests.support.nodes import meeting_place

skip_module_without("xxhash")

__all__ = ["launcher"]

pytestmark = pytest.mark.timeout(300)

GPT = ROOT / "examples" / "train_gpt.py"
ITERATIONS = 10
KILLED_AT = 6
TWO = ("--nproc-per-node", "2", "--max-restarts", "3")
TRAIN = """
import hashlib, torch
from megatron_ft import memory_checkpoint
from megatron_ft.ipc.linux.processes import all_processes, carries
from megatron_ft.ipc.memory import segment
torch.set_num_threads(1)
torch.manual_seed(RANK)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
def state_after(iteration):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "torch": torch.get_rng_state(),
            "iteration": iteration}
def kill(pid=None):
    os.kill(pid or os.getpid(), signal.SIGKILL)
def keeper_pid():
    mark = ("FT_TEST_MARK=" + os.environ["FT_TEST_MARK"]).encode()
    return next(each.pid for each in all_processes() if each.comm == "ft_keeper" and carries(each.pid, mark))
def meet(iteration):
    # ranks of a job wait for each other in each step, as with a collective
    open(f"{CYCLE}.{iteration}.{RANK}", "w").close()
    while not os.path.exists(f"{CYCLE}.{iteration}.{1 - RANK}"):
        time.sleep(0.005)
def before(iteration):
    pass
{more}
state = state_after(0)
if memory_checkpoint.restore(state) is not None:
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["torch"])
say("rank", RANK, "begins cycle", CYCLE, "at", state["iteration"])
for iteration in range(state["iteration"], ITERATIONS):
    meet(iteration)
    before(iteration)
    loss = model(torch.randn(16, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    memory_checkpoint.save(iteration + 1, state_after(iteration + 1))
    memory_checkpoint.wait()
digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in model.state_dict().values()))
say("rank", RANK, "ends with", digest.hexdigest())
"""


def script(more: str = "") -> str:
    return TRAIN.replace("{more}", more).replace("ITERATIONS", str(ITERATIONS))


DIES = f"""
def before(iteration):
    if CYCLE == 0 and RANK == 1 and iteration == {KILLED_AT}:
        kill()
"""


def weights(finished: Finished) -> list[str]:
    return sorted(re.findall(r"^rank \d ends with \w+$", finished.out, re.MULTILINE))


def beginnings(finished: Finished, cycle: int) -> list[int]:
    """The iterations at which the ranks begin that cycle, by rank."""
    found = re.findall(rf"^rank (\d) begins cycle {cycle} at (\d+)$", finished.out, re.MULTILINE)
    return [int(iteration) for _, iteration in sorted(found)]


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    """Filled by the first test, which runs without a fault."""
    return []


def expected(launcher: Launcher, undisturbed: list[str]) -> list[str]:
    if not undisturbed:
        finished = launcher.run(script(), *TWO)
        assert finished.code == 0, finished.err
        undisturbed += weights(finished)
        assert len(undisturbed) == 2
    return undisturbed


def keeper_of(launched: Launched) -> int | None:
    return next((each.pid for each in launched.alive() if "--xxhash" in command_line(each.pid)), None)


def test_killed_rank_redoes_no_iteration_and_weights_are_those_of_an_undisturbed_run(
    launcher: Launcher, undisturbed: list[str]
) -> None:
    finished = launcher.run(script(DIES), *TWO)
    assert finished.code == 0, finished.err
    assert beginnings(finished, 1) == [KILLED_AT, KILLED_AT]
    assert f"restored iteration {KILLED_AT} from memory" in finished.lines
    assert weights(finished) == expected(launcher, undisturbed)


def test_rank_killed_while_it_copies_restores_the_last_complete_iteration(
    launcher: Launcher, undisturbed: list[str]
) -> None:
    more = f"""
write, writes = segment.write, 0
def dying_write(fd, data, offset):
    global writes
    writes += 1
    if current == {KILLED_AT} and CYCLE == 0 and RANK == 1 and writes > 1:
        kill()
    write(fd, data, offset)
segment.write = dying_write
def before(iteration):
    global current, writes
    current, writes = iteration, 0
"""
    finished = launcher.run(script(more), *TWO)
    assert finished.code == 0, finished.err
    assert beginnings(finished, 1) == [KILLED_AT, KILLED_AT]  # rank 0 has one more, which isn't complete
    assert weights(finished) == expected(launcher, undisturbed)


def test_keeper_that_is_killed_is_replaced_and_loses_nothing(launcher: Launcher, undisturbed: list[str]) -> None:
    more = f"""
def before(iteration):
    if CYCLE == 0 and RANK == 1 and iteration == {KILLED_AT}:
        while not os.path.exists("keeper_replaced"):
            time.sleep(0.01)
        kill()
"""
    launched = launcher.start(script(more), *TWO)
    wait_until(lambda: keeper_of(launched) is not None, START_S)
    launched.wait_for("rank 0 begins cycle 0")
    killed = keeper_of(launched)
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: keeper_of(launched) not in (None, killed), START_S)
    (launched.directory / "keeper_replaced").touch()
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert beginnings(finished, 1) in ([KILLED_AT, KILLED_AT], [KILLED_AT - 1, KILLED_AT - 1])
    (line,) = [line for line in finished.lines if "keeper" in line]
    assert re.fullmatch(
        r"the keeper of memory checkpoints exited \(.*SIGKILL.*\); another one takes over \d segments?", line
    )
    assert weights(finished) == expected(launcher, undisturbed)


def test_keeper_and_rank_killed_at_once_lose_nothing(launcher: Launcher, undisturbed: list[str]) -> None:
    more = f"""
def before(iteration):
    if CYCLE == 0 and RANK == 1 and iteration == {KILLED_AT}:
        kill(keeper_pid())
        kill()
"""
    finished = launcher.run(script(more), *TWO)
    assert finished.code == 0, finished.err
    assert beginnings(finished, 1) in ([KILLED_AT, KILLED_AT], [KILLED_AT - 1, KILLED_AT - 1])  # rank 0's may be late
    assert weights(finished) == expected(launcher, undisturbed)


def test_segment_changed_before_it_is_sealed_is_found_and_not_used(launcher: Launcher, undisturbed: list[str]) -> None:
    more = f"""
write = segment.write
def flipping_write(fd, data, offset):
    write(fd, data, offset)
    if current == {KILLED_AT - 1} and CYCLE == 0 and RANK == 1 and offset == 0:
        os.pwrite(fd, bytes([os.pread(fd, 1, 5)[0] ^ 4]), 5)
segment.write = flipping_write
def before(iteration):
    global current
    current = iteration
    if CYCLE == 0 and RANK == 1 and iteration == {KILLED_AT}:
        kill()
"""
    finished = launcher.run(script(more), *TWO)
    assert finished.code == 0, finished.err
    damaged = f"the memory checkpoint of iteration {KILLED_AT} of rank 1 is damaged and not used: state['model']"
    assert [line for line in finished.lines if line.startswith(damaged)], finished.lines
    assert beginnings(finished, 1) == [KILLED_AT - 1, KILLED_AT - 1]
    assert weights(finished) == expected(launcher, undisturbed)


def test_memory_that_does_not_suffice_is_one_line_and_training_goes_on(
    launcher: Launcher, undisturbed: list[str]
) -> None:
    more = "from megatron_ft.rank.memory import saving\nsaving._LAYOUT_SLACK = 1 << 44"
    finished = launcher.run(script(more), *TWO)
    assert finished.code == 0, finished.err
    (line,) = [line for line in finished.lines if "memory" in line]
    assert re.fullmatch(
        r"no memory checkpoints on this node, training goes on without them: 2 ranks need \S+ GB "
        r"\(each up to 3 x \S+ GB \+ \S+ \wB of copies\).*; \S+ GB are free \(.*less a reserve of \S+ GB\)",
        line,
    )
    assert weights(finished) == expected(launcher, undisturbed)


def test_two_nodes_go_on_from_the_iteration_that_both_have(launcher: Launcher, undisturbed: list[str]) -> None:
    place = meeting_place("--nnodes=2", "--nproc-per-node=1", "--max-restarts=3")
    together = script(f"{DIES}os.chdir({str(launcher.directory)!r})\n")
    nodes = [launcher.start(together, *place, f"--node-rank={rank}") for rank in (0, 1)]
    ended = [node.wait(150) for node in nodes]
    assert [each.code for each in ended] == [0, 0], ended[0].err + ended[1].err
    assert [beginnings(each, 1) for each in ended] == [[KILLED_AT], [KILLED_AT]]
    assert sorted(line for each in ended for line in weights(each)) == expected(launcher, undisturbed)
    restored = f"restored iteration {KILLED_AT} from memory"
    assert [sum(restored in line for line in each.lines) for each in ended] == [1, 1]  # the second one prints copies
    alone = "no other node keeps copies of memory checkpoints: this takes FT_SECRET, the same on all nodes"
    assert [sum(line == alone for line in each.lines) for each in ended] == [1, 1]


def test_restore_that_fails_is_told_to_the_launcher_and_tried_again(launcher: Launcher, undisturbed: list[str]) -> None:
    more = DIES + "if CYCLE == 1 and RANK == 1:\n    model.register_buffer('more', torch.zeros(3))\n"
    finished = launcher.start(script(more), *TWO).wait(150)  # rank 0 has 30 s to fail by itself
    assert finished.code == 0, finished.err
    why = "SnapshotError: state['model']['more'] was not saved"
    told = f"cycle 1 ended: rank 1 can't restore iteration {KILLED_AT} from memory: {why}"
    assert f"[ft_launcher] {told}" in finished.err  # it may follow a part of a line of the rank's traceback
    assert beginnings(finished, 2) == [KILLED_AT, KILLED_AT]
    assert weights(finished) == expected(launcher, undisturbed)


def test_keeper_that_always_dies_is_given_up_and_the_job_trains_on(launcher: Launcher, undisturbed: list[str]) -> None:
    more = """
def before(iteration):
    while iteration == 1 and not os.path.exists("given_up"):
        time.sleep(0.01)
"""
    launched = launcher.start(script(more), *TWO)
    for number in range(5):
        wait_until(lambda: keeper_of(launched) is not None, START_S)
        launched.wait_for("another one takes over", count=number)
        os.kill(keeper_of(launched) or 0, signal.SIGKILL)
        if number < 4:
            launched.wait_for("another one takes over", count=number + 1)
    launched.wait_for("the job trains on without memory checkpoints")
    (launched.directory / "given_up").touch()
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert weights(finished) == expected(launcher, undisturbed)


def test_fork_of_a_rank_neither_saves_nor_disturbs(launcher: Launcher, undisturbed: list[str]) -> None:
    more = (
        DIES
        + """
quiet = before
def before(iteration):
    if iteration in (2, 3):
        child = os.fork()
        if child == 0:
            memory_checkpoint.save(iteration + 100, state_after(iteration + 100))
            memory_checkpoint.wait()
            os._exit(0)
        os.waitpid(child, 0)
    quiet(iteration)
"""
    )
    finished = launcher.run(script(more), *TWO)
    assert finished.code == 0, finished.err
    assert beginnings(finished, 1) == [KILLED_AT, KILLED_AT]
    assert weights(finished) == expected(launcher, undisturbed)


def test_job_that_saves_nothing_has_no_keeper(launcher: Launcher) -> None:
    launched = launcher.start("say('begun')\nforever()", "--nproc-per-node", "1")
    launched.wait_for("begun")
    assert keeper_of(launched) is None
    launched.signal(signal.SIGTERM)
    launched.wait()


def test_launcher_that_is_killed_leaves_no_keeper(launcher: Launcher) -> None:
    launched = launcher.start(script("def before(iteration):\n    if iteration == 2: forever()"), *TWO)
    wait_until(lambda: keeper_of(launched) is not None, START_S)
    launched.signal(signal.SIGKILL)
    wait_until(lambda: keeper_of(launched) is None, START_S)
    launched.process.wait(30)


def test_gpt_redoes_at_most_one_iteration_and_ends_with_the_weights_of_an_undisturbed_run(
    launcher: Launcher, tmp_path: Path
) -> None:
    """The rank is killed in the moment after a save: its copy of that iteration may not be committed yet."""
    small = ["--hidden-size=32", "--seq-length=16", "--vocab-size=32", "--train-iters=12", "--log-interval=1"]
    small += ["--eval-interval=0", "--save-interval=100", "--memory-checkpoint-interval=1"]
    plan = tmp_path / "plan.yaml"
    slow = "{cycle: 0, rank: 0, iteration: 1, type: slow, seconds: 0.4}"  # a step takes longer than a snapshot
    plan.write_text(f"seed: 0\nfaults:\n  - {slow}\n  - {{cycle: 0, rank: 1, iteration: 8, type: rank_killed}}\n")
    calm = launcher.start([str(GPT), *small, f"--save={tmp_path / 'calm'}"], *TWO).wait(150)
    hit = launcher.start([str(GPT), *small, f"--save={tmp_path / 'hit'}", f"--fault-plan={plan}"], *TWO).wait(150)
    assert (calm.code, hit.code) == (0, 0), calm.err + hit.err
    (restored,) = re.findall(r"restored iteration (\d+) from memory", hit.err)
    assert int(restored) in (7, 8)
    hashes = [re.findall(r"^final weights sha256: (\w+)$", each.out, re.MULTILINE) for each in (calm, hit)]
    assert hashes[0] == hashes[1] != []
