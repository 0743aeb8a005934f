"""A bad day is told from a bad job: who fails at the same iteration for ever is ended, who gets on isn't."""

from __future__ import annotations

import tempfile

from tests.support.launching import Launcher, launcher
from tests.support.nodes import meeting_place

__all__ = ["launcher"]

TWO = ("--nproc-per-node", "2")
JOB = """
from megatron_ft import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
saved = CYCLE // {cycles_per_checkpoint} * 5
for iteration in range(saved, saved + 20):
    client.set_iteration(iteration)
    further = f"{directory}/{{CYCLE}}"  # rank 0 gets further each time, which counts for nothing
    if RANK == 0 and iteration == saved + min(3 + CYCLE, 12):
        open(further, "w").close()
    if RANK == 1 and iteration == saved + 3 and CYCLE < {failures}:
        while not os.path.exists(further):
            time.sleep(0.002)
        os._exit(7)
    if RANK == 0 and CYCLE < {failures}:
        time.sleep(0.01)
client.shutdown_workload_monitoring()
"""
NO_PROGRESS = "no progress in {} cycles, giving up"


def job(launcher: Launcher, *, cycles_per_checkpoint: int, failures: int) -> str:
    """A script for one launch."""
    directory = tempfile.mkdtemp(dir=launcher.directory)
    return JOB.format(cycles_per_checkpoint=cycles_per_checkpoint, failures=failures, directory=directory)


def cycles(launcher: Launcher) -> int:
    """Of the last launch; its last one must have ended well."""
    ends = launcher.launches[-1].ends()
    assert [action for _, _, action, _ in ends] == ["restart"] * (len(ends) - 1) + ["finish"]
    return len(ends)


def test_a_job_that_fails_at_the_same_iteration_for_ever_ends_with_its_own_code(launcher: Launcher) -> None:
    script = job(launcher, cycles_per_checkpoint=1000, failures=1000)
    launched = launcher.start(script, *TWO, "--max-restarts=500")
    finished = launched.wait()
    launched.assert_nothing_left()
    assert finished.code == 93
    assert [end[:3] for end in launched.ends()] == [(1, "crash", "restart")] * 3 + [(1, "crash", "give_up")]
    assert [event["iteration"] for event in launched.events("cycle_ended")] == [3] * 4
    assert launched.exits(3)[1] == (7, False)
    assert NO_PROGRESS.format(3) in finished.lines[-1]
    assert launched.events("run_ended")[0]["exit_code"] == 93


def test_a_start_that_fails_in_the_same_way_twice_is_not_tried_again(launcher: Launcher) -> None:
    launched = launcher.start("import not_there", *TWO, "--max-restarts=500")
    finished = launched.wait()
    assert finished.code == 93
    assert [end[1:3] for end in launched.ends()] == [("crash", "restart"), ("crash", "give_up")]
    assert "ModuleNotFoundError: No module named 'not_there'" in finished.lines[-1]
    assert "2 starts in a row" in finished.lines[-1]
    again = "if CYCLE < 3: import not_there"
    finished = launcher.run(again, *TWO, "--max-restarts=3", "--ft-max-no-progress-cycles=0")
    assert (finished.code, cycles(launcher)) == (0, 4)
    # one that has trained before may find a shared library again
    trained = "from megatron_ft import RankMonitorClient\nclient = RankMonitorClient()\n"
    trained += "if CYCLE == 0: client.init_workload_monitoring(); client.send_heartbeat(); os._exit(3)\n" + again
    finished = launcher.run(trained, *TWO, "--max-restarts=3")
    assert (finished.code, cycles(launcher)) == (0, 4)


def test_bound_and_exit_code_for_lack_of_progress_follow_the_options(launcher: Launcher) -> None:
    script = job(launcher, cycles_per_checkpoint=1000, failures=6)
    bound = "--ft-max-no-progress-cycles=2"
    assert launcher.run(script, *TWO, "--max-restarts=500", bound).code == 93
    script = job(launcher, cycles_per_checkpoint=1000, failures=6)
    finished = launcher.run(script, *TWO, "--max-restarts=500", "--ft-max-no-progress-cycles=0")
    assert (finished.code, cycles(launcher)) == (0, 7)


def test_a_job_that_saves_something_in_between_goes_on(launcher: Launcher) -> None:
    script = job(launcher, cycles_per_checkpoint=3, failures=20)
    finished = launcher.run(script, *TWO, "--max-restarts=20")
    assert (finished.code, cycles(launcher)) == (0, 21)


def test_job_with_fifty_random_faults_and_steady_progress_finishes(launcher: Launcher) -> None:
    """Each cycle saves an iteration or two more than the last one, and is ended somehow."""
    script = """
import random
from megatron_ft import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
chance = random.Random(CYCLE)
saved = sum(random.Random(cycle).randint(1, 2) for cycle in range(CYCLE))
last = chance.randint(1, 2)
fault, victim = chance.choice(["kill", "raise", "exit", "segv", "stop"]), chance.randrange(2)
for iteration in range(saved, saved + last + 1):
    client.set_iteration(iteration)
    with client.section("step"):
        time.sleep(0.005)
        if iteration == saved + last and CYCLE < 50 and RANK == victim:
            if fault == "raise":
                raise ValueError("a bad batch")
            if fault == "exit":
                os._exit(3)
            numbers = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}
            os.kill(os.getpid(), numbers[fault])
if CYCLE < 50:
    forever()
client.shutdown_workload_monitoring()
"""
    section = "--ft-rank-section-timeouts=step:1"
    launched = launcher.start(script, *TWO, section, "--max-restarts=50")
    finished = launched.wait(100)
    launched.assert_nothing_left()
    assert (finished.code, cycles(launcher)) == (0, 51)
    causes = {event["cause"]["kind"] for event in launched.events("cycle_ended") if event["cause"]}
    assert {"hang", "crash"} <= causes or {"hang", "signal"} <= causes


def test_a_job_that_tells_no_iterations_is_not_judged(launcher: Launcher) -> None:
    finished = launcher.run("sys.exit(CYCLE < 8)", *TWO, "--max-restarts=8")
    assert (finished.code, cycles(launcher)) == (0, 9)


def test_two_nodes_end_together(launcher: Launcher) -> None:
    script = job(launcher, cycles_per_checkpoint=1000, failures=1000)
    place = meeting_place("--nnodes=2", "--max-restarts=500")
    nodes = [launcher.start(script, *place) for _ in range(2)]
    for node in nodes:
        finished = node.wait()
        assert finished.code == 93
        assert NO_PROGRESS.format(3) in finished.lines[-1]
