"""When a fit was the last one that the training needs."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch", reason="the extra megatron_ft[lightning] isn't installed")

from megatron_ft.integrations.lightning_finished import why_finished


def why(*, iterations: int = 20, is_resumed: bool = True, is_cut_short: bool = False, **changes: Any) -> str | None:
    """Why a training is finished; it was stopped in the middle, after some batches, unless said otherwise."""
    values = {"global_step": 40, "max_steps": -1, "current_epoch": 2, "max_epochs": -1, "should_stop": False}
    trainer = SimpleNamespace(**{**values, "callbacks": [], **changes})
    return why_finished(trainer, iterations=iterations, is_resumed=is_resumed, is_cut_short=is_cut_short)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_steps": 40}, "max_steps=40 is reached"),
        ({"max_steps": 30, "iterations": 0}, "max_steps=30 is reached"),
        ({"max_epochs": 2}, "max_epochs=2 is reached"),
        ({"iterations": 0}, "nothing left to train at step 40"),
        ({"iterations": 1}, "nothing left to train"),
        ({}, None),
        ({"iterations": 2}, None),
        ({"iterations": 1, "is_resumed": False}, None),  # the first job of all was stopped early
        ({"iterations": 0, "is_cut_short": True}, None),
    ],
)
def test_training_is_finished_if_a_limit_is_reached_or_nothing_was_left(
    changes: dict[str, Any], words: str | None
) -> None:
    reason = why(**changes)
    assert reason is None if words is None else words in (reason or "")


class Reason(Enum):
    NOT_STOPPED = 0
    PATIENCE_EXHAUSTED = 1


class EarlyStopping:
    """As Lightning's."""

    def __init__(self, stopped_epoch: int, reason: Reason | None) -> None:
        self.stopped_epoch = stopped_epoch
        if reason is not None:
            self.stopping_reason = reason


class MyEarlyStopping(EarlyStopping):
    pass


@pytest.mark.parametrize(
    ("callback", "should_stop", "is_early_stopped"),
    [
        (EarlyStopping(4, Reason.PATIENCE_EXHAUSTED), True, True),
        (MyEarlyStopping(4, Reason.PATIENCE_EXHAUSTED), True, True),
        (EarlyStopping(4, Reason.PATIENCE_EXHAUSTED), False, False),  # restored; this fit ended otherwise
        (EarlyStopping(2, Reason.PATIENCE_EXHAUSTED), True, False),  # restored; this fit was stopped by another
        (EarlyStopping(4, Reason.NOT_STOPPED), True, False),
        (EarlyStopping(4, None), True, True),  # before Lightning 2.6
        (SimpleNamespace(stopped_epoch=4), True, False),
    ],
)
def test_early_stopping_counts_if_it_ended_this_fit(callback: Any, should_stop: bool, is_early_stopped: bool) -> None:
    reason = why(current_epoch=5, should_stop=should_stop, callbacks=[callback, SimpleNamespace()])
    assert reason == ("EarlyStopping ended it at step 40" if is_early_stopped else None)
    assert why(current_epoch=5, should_stop=should_stop, callbacks=[callback], is_cut_short=True) is None
    assert why(current_epoch=0, should_stop=True, callbacks=[EarlyStopping(0, None)]) is None  # before Lightning 2.6
