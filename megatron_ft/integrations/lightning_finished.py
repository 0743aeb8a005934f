"""Whether a fit that ended was the last one that the training needs: then no further job is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_ft.integrations.lightning_packages import names_of_classes

__all__ = ["EndOfFit", "end_of_fit", "why_finished"]


@dataclass(frozen=True, kw_only=True)
class EndOfFit:
    """How a fit ended that no exception ended. A limit that isn't set is -1."""

    global_step: int
    max_steps: int
    epochs: int
    """That are complete."""
    max_epochs: int
    iterations: int
    """Batches trained in this fit."""
    is_resumed: bool
    """It began from a checkpoint."""
    is_early_stopped: bool
    """Lightning's ``EarlyStopping`` stopped it."""
    is_cut_short: bool
    """It was left early on purpose (``_TunerExitException``), e.g. because the time of the job was up."""


def why_finished(end: EndOfFit) -> str | None:
    """The reason why there is nothing left to train, or None if a further job has to go on.

    A fit that ``max_time`` or a preemption ended isn't finished. If it was the time for the whole training that
    was up, the next job finds that out: it resumes, and stops at once or after the one batch that Lightning trains
    when it restores the callbacks late.
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
    # should_stop alone may come from any callback, and what EarlyStopping says may be restored from a checkpoint
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
