"""Ends of ranks for torch's table of failures, which takes the one with the earliest time for the root cause."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from torch.distributed.elastic.multiprocessing import ProcessFailure

from megatron_ft.core.diagnosis.exits import Cause, RankExit
from megatron_ft.launcher.base import bounded_file_calls

__all__ = ["failure_table"]


def failure_table(
    failed: Sequence[RankExit], cause: Cause | None, error_files: Mapping[int, str]
) -> dict[int, ProcessFailure]:
    """By global rank; ``error_files`` by local rank."""
    first = None if cause is None else cause.rank
    failures: dict[int, ProcessFailure] = {}
    earliest = 0
    for rank_exit in sorted(failed, key=lambda rank_exit: (rank_exit.rank != first, rank_exit.at_ns)):
        failure = _process_failure(rank_exit, error_files.get(rank_exit.local_rank, ""))
        earliest = earliest or failure.timestamp
        failure.timestamp = max(earliest, failure.timestamp)
        failures[rank_exit.rank] = failure
    return failures


def _process_failure(rank_exit: RankExit, error_file: str) -> ProcessFailure:
    try:
        failure = bounded_file_calls.call(lambda: _failure_of(rank_exit, error_file), None)
    except Exception:  # noqa: BLE001 - torch raises whatever a half-written file makes it raise
        failure = None
    failure = failure or _failure_of(rank_exit, "")
    if rank_exit.exitcode == 0:
        failure.message = "ended with 0, but its monitor had found it hung"
    return failure


def _failure_of(rank_exit: RankExit, error_file: str) -> ProcessFailure:
    failure = ProcessFailure(
        local_rank=rank_exit.local_rank,
        pid=rank_exit.pid,
        exitcode=rank_exit.exitcode,
        error_file=error_file,
    )
    if not failure.timestamp or not os.path.isfile(error_file):
        failure.timestamp = round(time.time() - (time.monotonic_ns() - rank_exit.at_ns) / 1e9)
    return failure
