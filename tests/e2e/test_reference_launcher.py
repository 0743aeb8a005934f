"""What jobs of nvidia-resiliency-ext ask of their launcher, and find from it."""

from __future__ import annotations

import time
from pathlib import Path

from tests.support.launching import Launcher

FAILS_ONCE = "os._exit(7) if CYCLE == 0 else None"


def test_the_variables_of_a_cycle(launcher: Launcher) -> None:
    names = ("CYCLE", "INFRA_RANK", "LAUNCH_TIME", "CYCLE_START_TIME")
    show = f'say(*(os.environ.get("NVRX_" + name) for name in {names}))'
    before = time.time()
    finished = launcher.run(f"{show}\n{FAILS_ONCE}", "--max-restarts=1", env={"GROUP_RANK": "4"})
    assert finished.code == 0
    first, second = (line.split() for line in finished.out.splitlines())
    (cycle_0, rank_0, began_0, round_0), (cycle_1, rank_1, began_1, round_1) = first, second
    assert round_0 == "None"
    assert float(began_0) < float(round_1) <= float(began_1)
    assert (cycle_0, cycle_1, rank_0, rank_1) == ("0", "1", "4", "4")
    assert before < float(began_0) < float(began_1) < time.time()


def test_application_log_of_a_cycle_holds_the_output_of_all_its_ranks(launcher: Launcher, tmp_path: Path) -> None:
    prefix = tmp_path / "logs" / "job.log"
    script = f"""
print("first", end=" "); print("line"); print("second\\nthird", file=sys.stderr); sys.stdout.write("no end")
if CYCLE == 1: sys.exit()
{FAILS_ONCE}"""
    options = [f"--ft_per_cycle_applog_prefix={prefix}", "--max-restarts=1", "--nproc-per-node=2"]
    finished = launcher.run(script, *options)
    assert finished.code == 0
    assert (finished.out, "second" in finished.err) == ("", False)
    ended = sorted((tmp_path / "logs" / "job_cycle1.log").read_text().splitlines())
    assert ended == sorted(f"{rank}: {line}" for rank in (0, 1) for line in ("first line", "no end", "second", "third"))
    failed = (tmp_path / "logs" / "job_cycle0.log").read_text().splitlines()
    # each rank fails, and the other one may be ended before it has written anything
    assert "second" in " ".join(failed)
    assert {line[:3] for line in failed} <= {"0: ", "1: "}


def test_progress_of_ranks_that_report_none_is_what_a_file_says(launcher: Launcher, tmp_path: Path) -> None:
    saved = tmp_path / "latest_checkpointed_iteration.txt"
    options = [f"--ft-checkpoint-iteration-file={saved}", "--max-restarts=20", "--ft-max-no-progress-cycles=2"]
    script = f"open({str(saved)!r}, 'w').write(str(min(CYCLE, 3) * 10)); os._exit(7)"
    finished = launcher.run(script, *options)
    assert finished.code == 93
    assert len([line for line in finished.lines if " ended: " in line]) == 6
