"""A log directory that can't be made costs the logs and nothing else."""

from __future__ import annotations

from tests.support.launching import Launcher

FAILS_ONCE = """
if CYCLE == 0:
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
