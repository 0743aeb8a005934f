"""A log directory that can't be made, or is gone in the middle of a job, costs the logs and nothing else."""

from __future__ import annotations

from tests.support.launching import Launcher

FAILS_ONCE = """
import shutil
if CYCLE == 0:
    if sys.argv[1:]:
        shutil.rmtree(sys.argv[1])
        open(sys.argv[1], "w").close()
    raise ValueError("as asked")
say("went on in cycle", CYCLE)
"""


def test_job_without_writable_log_directories_warns_and_restarts(launcher: Launcher) -> None:
    # the last one given counts; root isn't allowed to make these either
    nowhere = ("--ft-log-dir=/proc/no", "--log-dir=/proc/no/ranks", "--redirects=3", "--max-restarts=1")
    finished = launcher.run(FAILS_ONCE, *nowhere)
    assert finished.code == 0
    assert "went on in cycle 1" in finished.out
    warnings = [line for line in finished.lines if line.startswith("warning: ")]
    assert [line.partition(":")[2].partition(":")[0] for line in warnings] == [
        " no logs are written",
        " could not create the ranks' log files; ranks write to the launcher's output",
    ]
    # from the error file, which needs no log directory
    (ended,) = [line for line in finished.lines if line.startswith("cycle 0 ended: ")]
    assert "ValueError: as asked" in ended


def test_cycle_whose_log_directory_is_gone_writes_to_the_launchers_output(launcher: Launcher) -> None:
    logs = launcher.directory / "ranks"
    finished = launcher.run(
        FAILS_ONCE, f"--log-dir={logs}", "--redirects=3", "--max-restarts=1", script_args=[str(logs)]
    )
    assert finished.code == 0
    assert "went on in cycle 1" in finished.out, "on the launcher's own output"
    assert any("could not create the ranks' log files" in line for line in finished.lines)
