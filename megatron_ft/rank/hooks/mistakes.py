"""A user's mistake that only a rank can find: one line, and the job ends, for a restart would meet it again."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import NoReturn

from megatron_ft.core.control import WorkloadAction, WorkloadControlRequest
from megatron_ft.core.errors import ConfigError, RankMonitorClientError
from megatron_ft.rank.base.say import print_rank_0
from megatron_ft.rank.client.client import RankMonitorClient

__all__ = ["EXIT_CODE", "ask_for_no_restart", "end_job", "no_restart_for_mistakes"]

EXIT_CODE = 2
"""How a rank ends whose user has to change something first."""


def ask_for_no_restart(problem: str) -> None:
    """Tell the launcher, if there is one."""
    with contextlib.suppress(RankMonitorClientError, OSError):  # there is none: the user still reads the error
        request = WorkloadControlRequest(WorkloadAction.ShutdownWorkload, problem)
        RankMonitorClient().send_workload_control_request(request)


@contextlib.contextmanager
def no_restart_for_mistakes() -> Iterator[None]:
    """A ConfigError passes, and before it ends the rank the launcher is asked not to restart."""
    try:
        yield
    except ConfigError as error:
        ask_for_no_restart(str(error))
        raise


def end_job(problem: str) -> NoReturn:
    """Say it on rank 0, and end this rank; to be called on all of them.

    Raises:
        SystemExit: always.
    """
    print_rank_0(f"FT: ERROR: {problem}", file=sys.stderr)
    ask_for_no_restart(problem)
    raise SystemExit(EXIT_CODE)
