"""User errors that only a rank can find: print one line and end the job, since a restart would fail again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

from megatron_ft.errors import ConfigError, RankMonitorClientError
from megatron_ft.exit_codes import MISTAKE_CODE
from megatron_ft.link.base.control import WorkloadAction, WorkloadControlRequest
from megatron_ft.link.log import ERROR, RANK
from megatron_ft.rank.base import agreement
from megatron_ft.rank.client.client import RankMonitorClient


def ask_for_no_restart(problem: str) -> None:
    with contextlib.suppress(RankMonitorClientError, OSError):  # no launcher: the user still reads the error
        request = WorkloadControlRequest(WorkloadAction.ShutdownWorkload, problem)
        RankMonitorClient().send_workload_control_request(request)


@contextlib.contextmanager
def no_restart_for_mistakes() -> Iterator[None]:
    """Ask the launcher not to restart if a ConfigError passes."""
    try:
        yield
    except ConfigError as error:
        ask_for_no_restart(str(error))
        raise


def end_job(problem: str) -> NoReturn:
    """Print the problem on rank 0, ask the launcher not to restart, and end this rank. All ranks call this.

    Raises:
        SystemExit: always.
    """
    if agreement.rank() == 0:
        RANK.say(ERROR, f"ERROR: {problem}")
    ask_for_no_restart(problem)
    raise SystemExit(MISTAKE_CODE)
