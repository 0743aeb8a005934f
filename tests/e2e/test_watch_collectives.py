"""Scripts that call nothing of ours: what is said when their collectives don't complete, and what is done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.launching import Launched, Launcher

TIMEOUT_S = 3.0
SCRIPT = str(Path(__file__).parents[1] / "verdicts" / "unhooked.py")
FAULTS = [
    {"kind": "skip", "rank": 1, "iteration": 3, "seconds": 0.0},
    {"kind": "loader", "rank": 2, "iteration": 7, "seconds": 0.0},
    {"kind": "computes", "rank": 0, "iteration": 4, "seconds": 2 * TIMEOUT_S},
]
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


def start(launcher: Launcher, watch: str, faults: list[dict[str, Any]]) -> Launched:
    """A job of 3 ranks that meets one fault in each cycle."""
    options = ["--nproc-per-node=3", f"--max-restarts={len(faults)}", f"--ft-watch-collectives={watch}"]
    return launcher.start([*options, SCRIPT, json.dumps(faults)])


def test_deadlock_is_named_by_rank_and_frame_and_a_computing_rank_is_left_alone(launcher: Launcher) -> None:
    """Its last cycle computes for longer than the threshold."""
    launched = start(launcher, f"end:{TIMEOUT_S:g}", FAULTS)
    finished = launched.wait(110)
    assert finished.code == 0, finished.err
    *causes, last = [event["cause"] for event in launched.events("cycle_ended")]
    assert last is None
    told = {each["cycle"]: each for each in launched.events("hang_reported")}
    for cycle, (cause, fault) in enumerate(zip(causes, FAULTS[:-1], strict=True)):
        assert cause["rank"] == told[cycle]["rank"] == fault["rank"]
        assert f"fault_{fault['kind']}" in cause["detail"], cause
        assert f" fault_{fault['kind']}" in told[cycle]["text"], told
        assert cause["text"].startswith(f"rank {fault['rank']} keeps the others waiting: no collective has completed")
    launched.assert_nothing_left()


def test_stalled_collective_is_only_reported_by_default(launcher: Launcher) -> None:
    launched = start(launcher, "report:2", [{"kind": "sleep", "rank": 2, "iteration": 5, "seconds": 4.5}])
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
