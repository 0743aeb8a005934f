"""Scripts that call nothing of ours: what is said when their collectives don't complete, and what is done."""

from __future__ import annotations

import json

from tests.support.launching import Launcher
from tests.verdicts.collectives import Fault, arguments, draw, read

IMPORTED_BEFORE = ()  # torch is enough

SEED = 3
TIMEOUT_S = 3.0
LOOKS_AT_EXIT = """
import threading
import torch.distributed as dist
from megatron_ft.rank.collectives import watch
begun = threading.Event()
def slow_counts():
    begun.set()
    time.sleep(0.3)
    say("look over")
watch.counts = slow_counts
dist.init_process_group("gloo")
assert begun.wait(30)
"""


def test_deadlock_is_named_by_rank_and_frame_and_a_computing_rank_is_left_alone(launcher: Launcher) -> None:
    """Its last cycle computes for longer than the threshold."""
    faults = [fault for fault in draw(SEED) if fault.kind in ("skip", "loader", "computes")]
    launched = launcher.start(arguments(faults, timeout_s=TIMEOUT_S))
    finished = launched.wait(110)
    assert finished.code == 0, finished.err
    named = read(faults[:-1], launched.log_dir)
    assert [each for each in named if not each.is_right] == []
    causes = [event["cause"] for event in launched.events("cycle_ended")]
    assert [cause and cause["rank"] for cause in causes] == [*(fault.rank for fault in faults[:-1]), None]
    for cause, fault in zip(causes[:-1], faults[:-1], strict=True):
        assert f"fault_{fault.kind}" in cause["detail"], cause
        assert cause["text"].startswith(f"rank {fault.rank} keeps the others waiting: no collective has completed")
    launched.assert_nothing_left()


def test_stalled_collective_is_only_reported_by_default(launcher: Launcher) -> None:
    fault = Fault(kind="sleep", rank=2, iteration=5, seconds=4.5)
    launched = launcher.start(arguments([fault], mode="report", timeout_s=2.0))
    finished = launched.wait(60)
    assert finished.code == 0, finished.err
    told = [line for line in finished.lines if "collective" in line and "configuration" not in line]
    assert "rank 2 in unhooked.py:" in told[0]
    assert told[0].endswith("(reported only, no rank is terminated)")
    record, *_ = launched.events("hang_reported")  # on a slow machine the end takes long enough to be told of, too
    assert (record["rank"], record["ends"]) == (2, False)
    # nobody has sent the ranks a signal for it
    written = [json.loads(path.read_text()) for path in (launched.log_dir / "evidence").glob("*/*.json")]
    assert {evidence["stacks_by"] for evidence in written} == {"a thread of its own"}


def test_look_at_the_collectives_that_has_begun_is_over_before_the_interpreter_exits(launcher: Launcher) -> None:
    """Python would end the thread below torch's C++, which ends the process with SIGABRT."""
    finished = launcher.run(LOOKS_AT_EXIT, "--nproc-per-node=2", "--max-restarts=0")
    assert finished.code == 0, finished.err
    assert finished.out.count("look over") == 2, finished.out
