"""`megatron-ft status JOB_DIR`: state of a whole job, from the event logs in its shared directory."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from megatron_ft.cli.base.terminal import terminal
from megatron_ft.cli.status.status_table import duration
from megatron_ft.core.codec import to_builtins
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.wording import columns, counted, printable
from megatron_ft.ipc.files.lives_file import lives_path, read_lives_file
from megatron_ft.job.rules.lives import Life

if TYPE_CHECKING:
    from megatron_ft.cli.logs.runs import Run
    from megatron_ft.cli.status.job_view import JobView

_LONG_S = 120.0
_REDRAW_S = 2.0
_NO_ID = "none"
"""torchrun's default --rdzv-id."""


def print_job(directory: str, *, as_json: bool, once: bool) -> bool:
    """Print the state of the newest run in the directory; in a terminal, follow it. Return False if there is none.

    Raises:
        ConfigError: the directory can't be read.
    """
    job = read_job(directory)
    if job is None:
        return False
    if as_json:
        print(json.dumps(to_builtins(job), indent=2), flush=True)
    elif once or job.is_over or not sys.stdout.isatty():
        print(text_of(job), flush=True)
    else:
        follow(job, directory)
    return True


def follow(job: JobView, directory: str, *, pause: Callable[[float], None] = time.sleep) -> None:
    """Redraw the state until Ctrl-C, or until the job is over; reading takes at most a fifth of the time."""
    from rich.live import Live
    from rich.text import Text

    with Live(Text(text_of(job)), console=terminal(), auto_refresh=False) as live:
        try:
            pause_s = _REDRAW_S
            while not job.is_over:
                pause(pause_s)
                began_s = time.monotonic()
                job = read_job(directory) or job
                pause_s = max(_REDRAW_S, 4 * (time.monotonic() - began_s))
                live.update(Text(text_of(job)), refresh=True)
        except KeyboardInterrupt:
            return  # the normal way to leave


def read_job(directory: str) -> JobView | None:
    """Return the state of the newest run in the directory; None if there is none.

    Raises:
        ConfigError: the directory can't be read.
    """
    from megatron_ft.cli.logs.runs import log_directory, runs_in
    from megatron_ft.cli.status.job_view import view

    if not directory:
        raise ConfigError("JOB_DIR is empty: name the directory that ft_launcher names as 'logs:'")
    directory = log_directory(directory)
    runs = runs_in([directory])
    if not runs or not any(log.header.role == "launcher" for log in runs[-1].files):
        return None
    job = view(runs[-1], life_of(directory, runs[-1]), time.time_ns())
    return replace(job, log_dir=directory)


def life_of(directory: str, run: Run) -> Life | None:
    """Return the last life in ``result.json``, unless it had ended before this run began."""
    try:
        lives = read_lives_file(lives_path(directory)).lives
    except (OSError, ValueError):
        return None  # a run that has just begun
    if not lives:
        return None
    opened = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(run.opened_ns / 1e9))
    return None if lives[-1].ended and lives[-1].ended < opened else lives[-1]


def text_of(job: JobView) -> str:
    """Return the job's state for a person, harmless for a terminal."""
    lines = [f"job{'' if job.run_id == _NO_ID else f' {job.run_id}'}: {_progress(job)}"]
    lines += [f"waiting for {job.waits_for}"] if job.waits_for else []
    if job.cause:
        lines.append(f"it ended: {job.cause}")
    elif job.last_cycle is not None:
        lines.append(f"cycle {job.last_cycle} ended: {job.last_cause}")
    cells = [("node", "place", "state", "last record")]
    for row in job.nodes:
        state = f"{row.state.value} ({row.detail})" if row.detail else row.state.value
        cells.append((row.name, "-" if row.place is None else str(row.place), state, f"{duration(row.age_s)} ago"))
    is_silent = not job.is_over and job.age_s >= _LONG_S
    doubt = " (ranks that call hooks are recorded every minute: it may have been killed, or not reach this directory)"
    newest = f"newest record: {duration(job.age_s)} ago{doubt if is_silent else ''}"
    return "\n".join(map(printable, [*lines, *(hang.line for hang in job.hangs), "", *columns(cells), "", newest]))


def _progress(job: JobView) -> str:
    if job.is_over:
        code = "" if job.exit_code is None else f" with exit code {job.exit_code}"
        parts = [f"{'ended' if job.outcome is None else job.outcome.value}{code}"]
        parts += [] if job.cycle is None else [counted(job.cycle + 1, "cycle")]
    elif job.cycle is None:
        parts = ["no cycle has begun yet"]
    else:
        how = f"running for {duration(job.cycle_s)}" if job.runs else "has ended"
        parts = [f"cycle {job.cycle} {how}"]
    if job.ranks is not None:
        parts.append(counted(job.ranks, "rank"))
    if job.restarts_left is not None and job.max_restarts is not None:
        parts.append(f"{job.restarts_left} of {counted(job.max_restarts, 'restart')} left")
    if job.iteration is not None:
        parts.append(f"iteration {job.iteration}")
    if job.goodput is not None:
        parts.append(f"goodput {job.goodput:.1%}")
    return ", ".join(parts)
