"""Memory checkpoints under `ft_launcher`: what survives the end of a rank, of the keeper, of a node, and of the job."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest

from tests.support.extras import skip_module_without
from tests.support.launching import START_S, Finished, Launched, Launcher, command_line, gone_at_the_end, wait_until
from tests.support.netns import Hosts
from tests.support.nodes import meeting_place, wait_for_all

skip_module_without("xxhash")

pytestmark = pytest.mark.timeout(300)

ITERATIONS = 14
TWO = ("--nproc-per-node", "2", "--max-restarts", "3")
TRAIN = """
import hashlib, pathlib, torch
from megatron_ft import memory_checkpoint
from megatron_ft.link.linux.processes import all_processes, carries
from megatron_ft.memory.base import segment
torch.set_num_threads(1)
torch.manual_seed(RANK)
WHERE, WORLD = pathlib.Path(*sys.argv[1:]), int(os.environ["WORLD_SIZE"])
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
    (WHERE / f"{CYCLE}.{iteration}.{RANK}").touch()
    while not all((WHERE / f"{CYCLE}.{iteration}.{rank}").exists() for rank in range(WORLD)):
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


def weights(*ended: Finished) -> list[str]:
    return sorted(line for each in ended for line in re.findall(r"^rank \d ends with \w+$", each.out, re.MULTILINE))


def beginnings(*ended: Finished, cycle: int) -> list[int]:
    """The iterations at which the ranks begin that cycle, by rank."""
    pattern = rf"^rank (\d) begins cycle {cycle} at (\d+)$"
    found = [pair for each in ended for pair in re.findall(pattern, each.out, re.MULTILINE)]
    return [int(iteration) for _, iteration in sorted(found)]


@pytest.fixture(scope="module")
def without_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """A job on a node that has no memory for snapshots: nothing disturbs it."""
    more = "from megatron_ft.memory.rank import saving\nsaving._SLACK = 1 << 44"
    with gone_at_the_end(Launcher(tmp_path_factory.mktemp("without_memory"))) as launcher:
        yield launcher.run(script(more), *TWO)


def keeper_of(launched: Launched) -> int | None:
    return next((each.pid for each in launched.alive() if "--xxhash" in command_line(each.pid)), None)


def test_memory_that_does_not_suffice_is_one_line_and_training_goes_on(without_memory: Finished) -> None:
    assert without_memory.code == 0, without_memory.err
    (line,) = [line for line in without_memory.lines if "memory" in line]
    assert re.fullmatch(
        r"no memory checkpoints on this node, training goes on without them: 2 ranks need \S+ GB "
        r"\(each up to 3 x \S+ GB \+ \S+ \wB of copies\).*; \S+ GB are free \(.*less a reserve of \S+ GB\)",
        line,
    )
    assert len(weights(without_memory)) == 2


def test_every_failed_cycle_goes_on_from_the_newest_whole_iteration_with_equal_weights(
    launcher: Launcher, without_memory: Finished
) -> None:
    """A rank is killed, can't restore, is killed while it copies, with the keeper, and after a damaged snapshot."""
    more = """
from megatron_ft.memory.rank import saving
copy, write_end, current = saving.copy_tensors, segment.write_end, 0
def ending_copy(*given):
    copy(*given)
    if (CYCLE, RANK, current) == (2, 1, 6):
        kill()
def damaging_end(fd, *given):
    if (CYCLE, RANK, current) == (4, 1, 11):
        os.pwrite(fd, bytes([os.pread(fd, 1, 5)[0] ^ 4]), 5)
    return write_end(fd, *given)
saving.copy_tensors, segment.write_end = ending_copy, damaging_end
if (CYCLE, RANK) == (1, 1):
    model.register_buffer("more", torch.zeros(3))
def before(iteration):
    global current
    current = iteration
    if CYCLE == 0 and iteration in (0, 2):  # a fork of a rank neither saves nor disturbs, before its first save either
        child = os.fork()
        if child == 0:
            memory_checkpoint.save(iteration + 100, state_after(iteration + 100))
            memory_checkpoint.wait()
            os._exit(0)
        os.waitpid(child, 0)
    if RANK == 1 and (CYCLE, iteration) in ((0, 3), (3, 9), (4, 12)):
        if CYCLE == 3:
            kill(keeper_pid())
        kill()
"""
    finished = launcher.start(script(more), "--nproc-per-node=2", "--max-restarts=5").wait(150)
    assert finished.code == 0, finished.err
    why = "rank 1 can't restore iteration 3 from memory: SnapshotError: state['model']['more'] was not saved"
    assert f"[ft_launcher] cycle 1 ended: {why}" in finished.err  # it may follow a part of a line of a traceback
    assert beginnings(finished, cycle=2) == [3, 3]
    assert "restored iteration 3 from memory" in finished.lines
    assert beginnings(finished, cycle=3) == [6, 6]  # rank 0 has one more, which isn't complete
    assert beginnings(finished, cycle=4) in ([9, 9], [8, 8])  # rank 0's may be late
    damaged = "the memory checkpoint of iteration 12 of rank 1 is damaged and not used: state['model']"
    assert [line for line in finished.lines if line.startswith(damaged)], finished.lines
    assert beginnings(finished, cycle=5) == [11, 11]
    assert weights(finished) == weights(without_memory)


def test_keeper_that_is_killed_is_replaced_and_one_that_always_dies_is_given_up(
    launcher: Launcher, without_memory: Finished
) -> None:
    more = """
def before(iteration):
    while iteration == 1 and not os.path.exists("given_up"):
        time.sleep(0.01)
"""
    launched = launcher.start(script(more), *TWO)
    replaced = r"the keeper of memory checkpoints exited \(.*SIGKILL.*\); another one takes over \d segments?"
    for number in range(5):
        wait_until(lambda: keeper_of(launched) is not None, START_S)
        launched.wait_for(replaced, count=number)
        os.kill(keeper_of(launched) or 0, signal.SIGKILL)
        if number < 4:
            launched.wait_for(replaced, count=number + 1)
    launched.wait_for("the job trains on without memory checkpoints")
    (launched.directory / "given_up").touch()
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert weights(finished) == weights(without_memory)


def test_keeper_starts_with_the_first_save_and_ends_with_its_launcher(launcher: Launcher) -> None:
    more = """
def before(iteration):
    while iteration == 0 and not os.path.exists("go"):
        time.sleep(0.01)
    if iteration == 2:
        forever()
"""
    launched = launcher.start(script(more), *TWO)
    launched.wait_for("rank 0 begins cycle 0")
    assert keeper_of(launched) is None
    (launched.directory / "go").touch()
    wait_until(lambda: keeper_of(launched) is not None, START_S)
    launched.signal(signal.SIGKILL)
    wait_until(lambda: keeper_of(launched) is None, START_S)
    launched.process.wait(30)


# -- the end of a job ---------------------------------------------------------------------------------------------

STOPPED_AT = 6
STOPS = f"""
def before(iteration):
    if not os.path.exists("second_life") and iteration == {STOPPED_AT}:
        open(f"waits.{{RANK}}", "w").close()
        forever()
    until = time.monotonic() + 60  # later snapshots are complete a moment after all ranks have saved them
    while iteration == {ITERATIONS - 1} and os.listdir("snapshots") and time.monotonic() < until:
        time.sleep(0.05)
"""


def test_both_nodes_of_a_stopped_job_go_on_where_they_were_in_the_next_life(
    launcher: Launcher, without_memory: Finished
) -> None:
    directory = launcher.directory / "snapshots"
    text = script(f"{STOPS}os.chdir({str(launcher.directory)!r})\n")

    def start() -> list[Launched]:
        place = meeting_place("--nnodes=2", "--nproc-per-node=1", f"--ft-memory-checkpoint-dir={directory}")
        return [launcher.start(text, *place, f"--node-rank={rank}") for rank in (0, 1)]

    first = start()
    wait_until(lambda: all((launcher.directory / f"waits.{rank}").exists() for rank in (0, 1)), 120)
    for node in first:
        node.signal(signal.SIGTERM)
    stopped = [node.wait(150) for node in first]
    # that all ranks have the last one is known a moment after they have saved it
    (written,) = re.findall(r"wrote iteration [56] to (\S+) \(.* of this node, .* s\)", stopped[0].err)
    begins = STOPPED_AT if f"iteration-{STOPPED_AT}-" in written else STOPPED_AT - 1
    assert sorted(os.listdir(written)) == ["rank-0", "rank-1"]
    for path in launcher.directory.glob("0.*"):
        path.unlink()  # what the ranks of cycle 0 meet by
    (launcher.directory / "second_life").touch()
    ended = [node.wait(150) for node in start()]
    assert [each.code for each in ended] == [0, 0], ended[0].err + ended[1].err
    assert beginnings(*ended, cycle=0) == [begins, begins]
    assert f"restored iteration {begins} from the files of an earlier life" in ended[0].err
    assert weights(*ended) == weights(without_memory)
    assert os.listdir(directory) == []  # later snapshots were complete


# -- copies on another node ---------------------------------------------------------------------------------------

SECRET = "0123456789abcdef0123456789abcdef"
LOST_AT = 6
LOSES_A_NODE = script(f"""
def before(iteration):
    if CYCLE == 0 and iteration == {LOST_AT}:
        say("rank", RANK, "waits to be lost")
        forever()
    time.sleep(0.3)
""")


def start_on_host(launcher: Launcher, hosts: Hosts, number: int) -> Launched:
    """Start a launcher of the job on a host of its own."""
    place = ["--rdzv-backend=c10d", "--rdzv-endpoint=node1:29500", "--rdzv-id=job", "--nnodes=3:3"]
    options = [*place, "--max-restarts=3", f"--node-rank={number}"]
    host, env = hosts.inhabitant(number + 1), {"FT_SECRET": SECRET}
    return launcher.start(LOSES_A_NODE, *options, script_args=[str(launcher.directory)], host=host, env=env)


def test_lost_nodes_ranks_go_on_from_its_copy_with_equal_weights(launcher: Launcher, hosts: Hosts) -> None:
    nodes = [start_on_host(launcher, hosts, number) for number in range(3)]
    for node in nodes:
        node.wait_for("^rank . begins cycle 0 at 0")
    spare = start_on_host(launcher, hosts, 3)
    for node in nodes:
        node.wait_for("^rank . waits to be lost", timeout_s=90)
    hosts.power_off(3, nodes[2])
    ended = wait_for_all([nodes[0], nodes[1], spare])
    assert [each.code for each in ended] == [0, 0, 0], ended[0].err
    (iteration,) = {*beginnings(*ended, cycle=1)}
    assert LOST_AT - 1 <= iteration <= LOST_AT
    assert f"restored iteration {iteration} from memory (1 rank from other nodes)" in ended[0].err
    undisturbed, where = LOSES_A_NODE.replace(f"iteration == {LOST_AT}", "False"), launcher.directory / "undisturbed"
    where.mkdir()
    finished = launcher.run(undisturbed, "--nproc-per-node=3", script_args=[str(where)])
    assert weights(*ended) == weights(finished)
