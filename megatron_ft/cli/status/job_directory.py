"""`megatron-ft status JOB_DIR`: state of a whole job, from the event logs in its shared directory."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_ft.cli.render.terminal import terminal
from megatron_ft.cli.status.status_table import duration
from megatron_ft.core.codec import to_builtins
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.job.lives import Life
from megatron_ft.core.wording import columns, counted, printable
from megatron_ft.ipc.files.lives_file import lives_path, read_lives_file

if TYPE_CHECKING:
    from megatron_ft.cli.logs.runs import RunLogs
    from megatron_ft.cli.status.job_view import JobView

_LONG_S = 120.0
_REDRAW_S = 2.0
_NO_ID = "none"
"""torchrun's default --rdzv-id."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """State of the newest run in a directory; ``log_dir`` is where its logs are."""

    run_id: str
    log_dir: str
    view: JobView

    def document(self) -> dict[str, Any]:
        """Return the state for scripts."""
        return {"run_id": self.run_id, "log_dir": self.log_dir, **to_builtins(self.view)}

    def text(self) -> str:
        """Return the state for a person, harmless for a terminal."""
        return "\n".join(map(printable, lines(self.run_id, self.view)))


def print_job(directory: str, *, as_json: bool, once: bool) -> bool:
    """Print the state of the newest run in the directory; in a terminal, follow it. Return False if there is none.

    Raises:
        ConfigError: the directory can't be read.
    """
    state = read_job(directory)
    if state is None:
        return False
    if as_json:
        print(json.dumps(state.document(), indent=2), flush=True)
    elif once or state.view.is_over or not sys.stdout.isatty():
        print(state.text(), flush=True)
    else:
        follow(state, directory)
    return True


def follow(state: RunState, directory: str, *, pause: Callable[[float], None] = time.sleep) -> None:
    """Redraw the state until Ctrl-C, or until the job is over; reading takes at most a fifth of the time."""
    from rich.live import Live
    from rich.text import Text

    with Live(Text(state.text()), console=terminal(), auto_refresh=False) as live:
        try:
            pause_s = _REDRAW_S
            while not state.view.is_over:
                pause(pause_s)
                began_s = time.monotonic()
                state = read_job(directory) or state
                pause_s = max(_REDRAW_S, 4 * (time.monotonic() - began_s))
                live.update(Text(state.text()), refresh=True)
        except KeyboardInterrupt:
            return  # the normal way to leave


def read_job(directory: str) -> RunState | None:
    """Return the state of the newest run in the directory; None if there is none.

    Raises:
        ConfigError: the directory can't be read.
    """
    from megatron_ft.cli.analysis.run_summary import summarize_run
    from megatron_ft.cli.logs.read import read_directory
    from megatron_ft.cli.logs.runs import log_directory, split_runs
    from megatron_ft.cli.status.job_view import view

    if not directory:
        raise ConfigError("JOB_DIR is empty: name the directory that ft_launcher names as 'logs:'")
    try:
        directory = log_directory(directory)
        logs = read_directory(directory)
    except OSError as error:
        raise ConfigError(f"{directory} can't be read: {error.strerror}") from None
    runs = split_runs(logs)
    if not runs or not any(log.header.role == "launcher" for log in runs[-1].files):
        return None
    job = view(runs[-1], summarize_run(runs[-1]), life_of(directory, runs[-1]), time.time_ns())
    return RunState(run_id=runs[-1].run_id, log_dir=directory, view=job)


def life_of(directory: str, run: RunLogs) -> Life | None:
    """Return the last life in ``result.json``, unless it had ended before this run began."""
    try:
        lives = read_lives_file(lives_path(directory)).lives
    except (OSError, ValueError):
        return None  # a run that has just begun
    if not lives:
        return None
    opened = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(run.opened_wall_ns / 1e9))
    return None if lives[-1].ended and lives[-1].ended < opened else lives[-1]


def lines(run_id: str, job: JobView) -> Iterator[str]:
    """Yield the job's state for a person."""
    yield f"job{'' if run_id == _NO_ID else f' {run_id}'}: {_progress(job)}"
    if job.waits_for:
        yield f"waiting for {job.waits_for}"
    if job.cause:
        yield f"it ended: {job.cause}"
    elif job.last_cycle is not None:
        yield f"cycle {job.last_cycle} ended: {job.last_cause}"
    for hang in job.hangs:
        yield hang.line
    yield ""
    cells = [("node", "place", "state", "last record")]
    for row in job.nodes:
        state = f"{row.state.value} ({row.detail})" if row.detail else row.state.value
        cells.append((row.name, "-" if row.place is None else str(row.place), state, f"{duration(row.age_s)} ago"))
    yield from columns(cells)
    yield ""
    yield f"newest record: {duration(job.age_s)} ago{_doubt(job)}"


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


def _doubt(job: JobView) -> str:
    if job.is_over or job.age_s < _LONG_S:
        return ""
    return " (ranks that call hooks are recorded every minute: it may have been killed, or not reach this directory)"
