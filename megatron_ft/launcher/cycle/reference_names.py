"""Files and variables under nvidia-resiliency-ext's names, for jobs that expect them from their launcher."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from megatron_ft.ipc.files.atomic_write import write_whole
from megatron_ft.ipc.files.event_log import EventLog
from megatron_ft.ipc.files.standard_error import put
from megatron_ft.launcher.base import bounded_file_calls
from megatron_ft.launcher.base.command_line import CommandLine
from megatron_ft.launcher.scheduler import environment
from megatron_ft.launcher.spawn.rank_logs import cycle_file


def variables(cycle: int, now_s: float, infra_rank: int | None) -> dict[str, str]:
    """Return the variables that Megatron-LM reads: cycle, wall-clock time, and the scheduler's number of this node."""
    values = {
        "NVRX_CYCLE": str(cycle),
        "NVRX_LAUNCH_TIME": repr(now_s),
        "NVRX_MEMBERSHIP": "active",
    }
    return values if infra_rank is None else {**values, "NVRX_INFRA_RANK": str(infra_rank)}


def infra_rank(line: CommandLine, environ: Mapping[str, str]) -> int | None:
    """Return this node's number: --node-rank, else the scheduler's."""
    if line.node_rank is not None:
        return line.node_rank
    return environment.rank(environ, min_nodes=line.min_nodes, max_nodes=line.max_nodes)[0]


def checkpointed(path: str | None) -> int | None:
    """Return the iteration of the last checkpoint; None if the file is missing, or holds no number."""
    if path is None:
        return None

    def read() -> int | None:
        with open(path) as file:
            return int(file.read(64))

    try:
        return bounded_file_calls.call(read, None)
    except (OSError, ValueError):
        return None


def cycle_info(line: CommandLine, environ: Mapping[str, str], log: EventLog) -> CycleInfo | None:
    """Return the writer of --ft-cycle-info-dir; None if the option isn't given."""
    options = line.options
    if options.cycle_info_dir is None:
        return None
    job = environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID") or line.run_id
    attempt = environ.get("SLURM_RESTART_COUNT", "")
    return CycleInfo(
        options.cycle_info_dir,
        job=(options.cycle_info_job_id or job).replace("/", "_"),
        attempt=int(attempt) if attempt.isdecimal() else 0,
        hosts=environment.hosts(environ, line.max_nodes),
        hostname=os.uname().nodename,
        do=log.do,
        output=options.per_cycle_applog_prefix,
    )


class CycleInfo:
    """One JSON file for each cycle, and a link to the current one. Written in a thread; failures are logged."""

    def __init__(
        self,
        directory: str,
        *,
        job: str,
        attempt: int,
        hosts: tuple[str, ...],
        hostname: str,
        do: Callable[[Callable[[], None]], object],
        output: str | None = None,
    ) -> None:
        """``hosts`` are the scheduler's; ``do`` runs file operations; ``output``: --ft-per-cycle-applog-prefix."""
        self._output = output
        self._directory = os.path.abspath(directory)
        self._job, self._attempt = job, attempt
        self._hosts, self._hostname = hosts, hostname
        self._do = do
        self._now: dict[str, Any] | None = None
        self.current = os.path.join(self._directory, f"cycle_info.{job}.current")

    def begun(self, cycle: int, *, nodes: int) -> None:
        """Write the start of a cycle on this number of nodes, before its ranks are made."""
        self.ended()
        names = self._hosts if len(self._hosts) == nodes else (self._hostname,) if nodes == 1 else ()
        self._now = {
            "job_id": self._job,
            "attempt_index": self._attempt,
            "cycle_number": cycle,
            "cycle_start_time": _utc(),
            "cycle_end_time": "",
            "cycle_log_file": "" if self._output is None else cycle_file(self._output, cycle),
            "active_nodes": ",".join(names),
            "standby_nodes": "",
            "generation": 0,
            "active_ranks": "0" if nodes == 1 else f"0-{nodes - 1}",
        }
        self._do(functools.partial(self._write, dict(self._now), is_new=True))

    def ended(self) -> None:
        """Write the end of the cycle, if there is one."""
        if self._now is not None:
            values = {**self._now, "cycle_end_time": _utc(), "generation": 1}
            self._now = None
            self._do(functools.partial(self._write, values, is_new=False))

    def _write(self, values: dict[str, Any], *, is_new: bool) -> None:
        name = f"cycle_info.{self._job}.{self._attempt}.{values['cycle_number']}"
        # protobuf's JSON format has 64-bit numbers as text
        text = json.dumps({**values, "generation": str(values["generation"])}, indent=2)
        try:
            os.makedirs(self._directory, exist_ok=True)
            write_whole(os.path.join(self._directory, name), text, mode=0o644)
            if is_new:
                os.symlink(name, f"{self.current}.{os.getpid()}")
                os.replace(f"{self.current}.{os.getpid()}", self.current)
        except OSError as error:
            put(f"megatron_ft: {self._directory}: {name} can't be written: {error.strerror}")


def _utc() -> str:
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1e6):06}Z"
