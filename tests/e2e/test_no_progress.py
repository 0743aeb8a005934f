"""A job that fails at the same iteration in every cycle is ended; one that gets further is not."""

from __future__ import annotations

from tests.support.launching import Launcher, launcher

__all__ = ["launcher"]

TWO = ("--nproc-per-node", "2")
CLIENT = """
from megatron_ft import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
"""
FAILS_AT_3 = f"""
{CLIENT}
for iteration in range(20):
    client.set_iteration(iteration)
    further = f"further-{{CYCLE}}"  # rank 0 gets further each time, which counts for nothing
    if RANK == 0 and iteration == min(3 + CYCLE, 12):
        open(further, "w").close()
    if RANK == 1 and iteration == 3:
        while not os.path.exists(further):
            time.sleep(0.002)
        os._exit(7)
    if RANK == 0:
        time.sleep(0.01)
"""


def test_job_that_fails_at_the_same_iteration_ends_with_93_after_three_cycles(launcher: Launcher) -> None:
    launched = launcher.start(FAILS_AT_3, *TWO, "--max-restarts=500")
    finished = launched.wait()
    launched.assert_nothing_left()
    assert finished.code == 93
    assert [end[:3] for end in launched.ends()] == [(1, "crash", "restart")] * 3 + [(1, "crash", "give_up")]
    assert [event["iteration"] for event in launched.events("cycle_ended")] == [3] * 4
    assert launched.exits(3)[1] == (7, False)
    assert "no progress in 3 cycles, giving up" in finished.lines[-1]
    assert launched.events("run_ended")[0]["exit_code"] == 93


def test_a_start_that_fails_in_the_same_way_twice_is_not_tried_again(launcher: Launcher) -> None:
    launched = launcher.start("import not_there", *TWO, "--max-restarts=500")
    finished = launched.wait()
    assert finished.code == 93
    assert [end[1:3] for end in launched.ends()] == [("crash", "restart"), ("crash", "give_up")]
    assert "ModuleNotFoundError: No module named 'not_there'" in finished.lines[-1]
    assert "2 starts in a row" in finished.lines[-1]
