"""The finished flag of Lightning fits: no further job is started after the last fit that the training needs.

A script may call ``trainer.fit`` several times. Each fit that ends writes the file named by
``FAULT_TOL_FINISHED_FLAG_FILE``, if nothing is left to train; the next fit of the same process withdraws it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from megatron_ft.integrations.lightning_packages import names_of_classes
from megatron_ft.rank.hooks.finished import FINISHED_FLAG, write_flag

__all__ = ["EndOfFit", "end_of_fit", "why_finished", "withdraw_flag", "write_flag_of_fit"]

flags_written: dict[str, tuple[object, ...]] = {}
"""Flags written by this process for a fit: path and identity of the file."""


@dataclass(frozen=True, kw_only=True)
class EndOfFit:
    """End of a fit without an exception. An unset limit is -1."""

    global_step: int
    max_steps: int
    epochs: int
    """Complete epochs."""
    max_epochs: int
    iterations: int
    """Batches trained in this fit."""
    is_resumed: bool
    """True if the fit began from a checkpoint."""
    is_early_stopped: bool
    """True if Lightning's ``EarlyStopping`` stopped the fit."""
    is_cut_short: bool
    """True if the fit was left early on purpose (``_TunerExitException``), e.g. because the job's time was up."""


def why_finished(end: EndOfFit) -> str | None:
    """Return why nothing is left to train, None if a further job has to go on.

    A fit that ``max_time`` or a preemption ended isn't finished. If the time for the whole training was up, the next
    job finds that out: it resumes, and stops at once or after the one batch that Lightning trains when it restores the
    callbacks late.
    """
    if 0 <= end.max_steps <= end.global_step:
        return f"max_steps={end.max_steps} is reached"
    if 0 <= end.max_epochs <= end.epochs:
        return f"max_epochs={end.max_epochs} is reached"
    if end.is_cut_short:
        return None
    if end.is_early_stopped:
        return f"EarlyStopping ended it at step {end.global_step}"
    if end.iterations == 0 or (end.iterations == 1 and end.is_resumed):
        return f"there was nothing left to train at step {end.global_step}"
    return None


def write_flag_of_fit(reason: str) -> str | None:
    """Write the flag after a fit. Return its path, None if the variable isn't set.

    ``withdraw_flag`` will remove it, unless it replaced a flag of another process, such as one of an earlier life.

    Raises:
        OSError: the file can't be written.
    """
    before = _current_flag()
    is_ours = before is None or _is_ours(*before)
    path = write_flag(reason)
    written = _current_flag()
    if is_ours and written is not None:
        flags_written[written[0]] = written[1]
    return path


def withdraw_flag() -> str | None:
    """Remove a flag that this process wrote after a fit, for another fit begins. Return its path, None without one.

    Raises:
        OSError: the file can't be removed.
    """
    current = _current_flag()
    if current is None or not _is_ours(*current):
        return None
    os.unlink(current[0])
    del flags_written[current[0]]
    return current[0]


def _current_flag() -> tuple[str, tuple[object, ...]] | None:
    """Return real path and identity of the current flag file; None if there is none."""
    path = os.environ.get(FINISHED_FLAG)
    if not path:
        return None
    path = os.path.realpath(path)
    try:
        found = os.stat(path)
    except OSError:
        return None
    # a shell that overwrites it keeps the inode, so size and time count too
    return path, (os.getpid(), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _is_ours(path: str, identity: tuple[object, ...]) -> bool:
    return flags_written.get(path) == identity


def end_of_fit(trainer: Any, *, iterations: int, is_resumed: bool, is_cut_short: bool) -> EndOfFit:
    """Read from a trainer how its fit ended."""
    max_epochs = trainer.max_epochs
    return EndOfFit(
        global_step=trainer.global_step,
        max_steps=trainer.max_steps,
        epochs=trainer.current_epoch,
        max_epochs=-1 if max_epochs is None else max_epochs,
        iterations=iterations,
        is_resumed=is_resumed,
        is_early_stopped=_is_early_stopped(trainer),
        is_cut_short=is_cut_short,
    )


def _is_early_stopped(trainer: Any) -> bool:
    # should_stop alone may come from any callback, and EarlyStopping's state may be restored from a checkpoint
    return bool(trainer.should_stop) and any(
        _has_stopped(callback, trainer.current_epoch)
        for callback in trainer.callbacks
        if "EarlyStopping" in names_of_classes(callback) and hasattr(callback, "stopped_epoch")
    )


def _has_stopped(early_stopping: Any, epoch: int) -> bool:
    stopped_epoch = early_stopping.stopped_epoch
    reason = getattr(early_stopping, "stopping_reason", None)  # since Lightning 2.6; before, epoch 0 meant "not"
    says_so = stopped_epoch > 0 if reason is None else reason.name != "NOT_STOPPED"
    return bool(says_so and 0 <= epoch - stopped_epoch <= 1)
