"""The finished flag of Lightning fits: no further job is started after the last fit that the training needs.

A script may call ``trainer.fit`` several times. Each fit that ends writes the file named by
``FAULT_TOL_FINISHED_FLAG_FILE``, if nothing is left to train; the next fit of the same process withdraws it.
"""

from __future__ import annotations

import os
from typing import Any

from megatron_ft.integrations.lightning_packages import names_of_classes
from megatron_ft.rank.hooks.finished import FINISHED_FLAG, write_flag

_written: tuple[object, ...] | None = None
"""Identity of the flag that this process wrote for its last fit."""


def why_finished(trainer: Any, *, iterations: int, is_resumed: bool, is_cut_short: bool) -> str | None:
    """Return why nothing is left to train after a fit without an exception, None if a further job has to go on.

    A fit that ``max_time`` or a preemption ended isn't finished. If the time for the whole training was up, the next
    job finds that out: it resumes, and stops at once or after the one batch that Lightning trains when it restores the
    callbacks late.

    Args:
        trainer: the trainer after its fit.
        iterations: batches trained in this fit.
        is_resumed: the fit began from a checkpoint.
        is_cut_short: the fit was left early on purpose (``_TunerExitException``), as when the job's time was up.
    """
    step, max_epochs = trainer.global_step, trainer.max_epochs
    if 0 <= trainer.max_steps <= step:
        return f"max_steps={trainer.max_steps} is reached"
    if max_epochs is not None and 0 <= max_epochs <= trainer.current_epoch:
        return f"max_epochs={max_epochs} is reached"
    if is_cut_short:
        return None
    # should_stop alone may come from any callback, and EarlyStopping's state may be restored from a checkpoint
    if trainer.should_stop and any(_has_stopped(callback, trainer.current_epoch) for callback in trainer.callbacks):
        return f"EarlyStopping ended it at step {step}"
    if iterations == 0 or (iterations == 1 and is_resumed):
        return f"there was nothing left to train at step {step}"
    return None


def _has_stopped(callback: Any, epoch: int) -> bool:
    """Return True for an ``EarlyStopping`` that stopped the fit in this epoch, or at the end of the one before."""
    if "EarlyStopping" not in names_of_classes(callback):
        return False
    reason = getattr(callback, "stopping_reason", None)  # since Lightning 2.6; before, epoch 0 meant "not"
    says_so = callback.stopped_epoch > 0 if reason is None else reason.name != "NOT_STOPPED"
    return bool(says_so and 0 <= epoch - callback.stopped_epoch <= 1)


def write_flag_of_fit(reason: str) -> str | None:
    """Write the flag after a fit. Return its path, None if the variable isn't set.

    ``withdraw_flag`` will remove it, unless it replaced a flag of another process, such as one of an earlier life.

    Raises:
        OSError: the file can't be written.
    """
    global _written
    is_ours = _identity() in (None, _written)
    path = write_flag(reason)
    _written = _identity() if is_ours else None
    return path


def withdraw_flag() -> str | None:
    """Remove a flag that this process wrote after a fit, for another fit begins. Return its path, None without one.

    Raises:
        OSError: the file can't be removed.
    """
    if _written is None or _identity() != _written:
        return None
    os.unlink(os.environ[FINISHED_FLAG])
    return os.environ[FINISHED_FLAG]


def _identity() -> tuple[object, ...] | None:
    """Return what tells the current flag from one of another process; None if there is none."""
    try:
        found = os.stat(os.environ.get(FINISHED_FLAG, ""))
    except OSError:
        return None
    # a shell that overwrites it keeps the inode, so size and time count too
    return os.getpid(), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
