"""What both Lightning callbacks do: the finished flag, requests to the launcher, learned heartbeats."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch", reason="the extra megatron_ft[lightning] isn't installed")

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from megatron_ft import WorkloadAction, WorkloadControlRequest
from megatron_ft.integrations import lightning_finished
from tests.support.lightning_fit import Do, FitBench, fits
from tests.support.lightning_job import Model
from tests.support.training import clean_environment

__all__ = ["clean_environment", "fits"]  # fixtures
# Lightning's own: advice for real trainings, and a deprecated call of torch
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]


@pytest.mark.parametrize(
    ("kind", "limits", "reason"),
    [
        ("sections", {"max_steps": 12}, "max_steps=12"),
        ("heartbeats", {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 12}, "max_epochs=1"),
    ],
)
def test_flag_names_the_limit_that_was_reached(fits: FitBench, kind: str, limits: dict[str, Any], reason: str) -> None:
    fits.fit(getattr(fits, kind)(), save_every=4, **limits)
    assert fits.flag.read_text() == f"the training is finished: {reason} is reached\n"
    # a run that has nothing left to do says so again, and leaves nothing open
    fits.forget()
    fits.fit(getattr(fits, kind)(), save_every=4, **limits)
    assert fits.flag.read_text() == f"the training is finished: {reason} is reached\n"
    assert fits.arguments_of("set_iteration") == []
    assert fits.open_sections() == []
    assert fits.names()[-1] == "shutdown_workload_monitoring"


def test_flag_is_not_written_without_autoresume(fits: FitBench) -> None:
    fits.fit(fits.sections(autoresume=False), max_steps=3)
    fits.fit(fits.heartbeats(autoresume=False), max_steps=3, resume=False)
    assert not fits.flag.exists()


@pytest.mark.parametrize(
    ("kind", "between"), [("sections", "nothing"), ("heartbeats", "validate"), ("sections", "same trainer")]
)
def test_second_fit_removes_the_flag_of_the_first_and_writes_its_own(fits: FitBench, kind: str, between: str) -> None:
    seen: list[bool] = []
    first = fits.fit(getattr(fits, kind)(), max_steps=3)
    assert fits.flag.exists()
    if between == "validate":
        first.validate(Model())
        assert fits.flag.exists()
    look = Do("on_train_batch_start", lambda _trainer: seen.append(fits.flag.exists()), at=0)
    if between == "same trainer":
        first.callbacks.append(look)
        first.fit_loop.max_epochs, first.fit_loop.epoch_loop.max_steps = -1, 6
        first.fit(Model())
    else:
        fits.fit(getattr(fits, kind)(), look, max_steps=6)
    assert set(seen) == {False}
    assert fits.flag.read_text() == "the training is finished: max_steps=6 is reached\n"


def replace_flag(fits: FitBench) -> None:
    fits.flag.with_name("new").write_text("an operator: enough\n")
    os.replace(fits.flag.with_name("new"), fits.flag)


def rewrite_flag(fits: FitBench) -> None:
    fits.flag.write_text("an operator: enough\n")


def become_a_child(fits: FitBench) -> None:
    """As if the flag had been written by the parent of this process."""
    assert lightning_finished._written is not None
    lightning_finished._written = (os.getppid(), *lightning_finished._written[1:])


@pytest.mark.parametrize("change", [replace_flag, rewrite_flag, become_a_child])
def test_flag_of_another_process_survives_the_next_fit(fits: FitBench, change: Callable[[FitBench], None]) -> None:
    fits.fit(fits.sections(), max_steps=3)
    change(fits)
    written = fits.flag.read_text()
    with pytest.raises(ArithmeticError):
        fits.fit(fits.sections(), Do("on_after_backward", fail), max_steps=6)
    assert fits.flag.read_text() == written


def test_flag_of_a_shutdown_on_request_survives_the_next_fit(fits: FitBench) -> None:
    policy = {"exc_handling_policy": lambda _error: request(WorkloadAction.ShutdownWorkload)}
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            fits.fit(fits.sections(**policy), Do("on_after_backward", fail))
        assert "on request" in fits.flag.read_text()
    with pytest.raises(ArithmeticError):
        fits.fit(fits.sections(), Do("on_after_backward", fail))
    assert fits.flag.exists()


def request(action: WorkloadAction) -> WorkloadControlRequest:
    return WorkloadControlRequest(action, "bad luck")


def fail(trainer: Any) -> None:
    raise ArithmeticError("x")


@pytest.mark.parametrize(
    ("answer", "asked", "flag"),
    [
        (request(WorkloadAction.ShutdownWorkload), True, "the workload was shut down on request: bad luck\n"),
        (request(WorkloadAction.ExcludeThisNode), True, None),
        (None, False, None),
        ("ShutdownWorkload", False, None),
    ],
)
def test_exception_policy_decides_request_and_flag(
    fits: FitBench, caplog: pytest.LogCaptureFixture, answer: Any, asked: bool, flag: str | None
) -> None:
    errors: list[BaseException] = []

    def policy(error: BaseException) -> Any:
        errors.append(error)
        return answer

    with pytest.raises(ArithmeticError, match="x"):
        fits.fit(fits.sections(exc_handling_policy=policy), Do("on_after_backward", fail, at=2))
    assert [type(error) for error in errors] == [ArithmeticError]
    assert fits.arguments_of("send_workload_control_request") == ([answer] if asked else [])
    assert (fits.flag.read_text() if fits.flag.exists() else None) == flag
    assert fits.names()[-1] == "shutdown_workload_monitoring"
    assert ("must return a WorkloadControlRequest" in caplog.text) is isinstance(answer, str)


# ---- heartbeats


def learned(fits: FitBench) -> dict[str, Any]:
    return json.loads((fits.save_dir / "_ft_state.json").read_text())


def test_heartbeats_are_sent_at_each_hook_of_a_fit(fits: FitBench) -> None:
    fits.fit(fits.heartbeats(), max_steps=11)
    beat, save = ["send_heartbeat"], ["send_heartbeat"]
    step = ["set_iteration", "send_heartbeat"]
    validation = beat * 5  # start, three batches, end
    assert fits.names("send_heartbeat", "set_iteration") == [
        *beat * 4,  # the sanity check: start, two batches, end
        *beat,
        *(step * 5 + validation),
        *(step * 5 + save * 2 + validation + step),
        *(beat * (len(fits.names("send_heartbeat")) - 4 - 1 - 11 - 2 - 10)),
    ]
    assert 2 <= len(fits.names("send_heartbeat")) - 28 <= 3  # the end of training, of the fit, perhaps a last save
    assert fits.transitions() == []


def test_heartbeat_timeouts_are_learned_and_used(
    fits: FitBench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits.fit(fits.heartbeats(), max_steps=20)
    assert not fits.names("calculate_and_set_hb_timeouts")  # no checkpoint was loaded
    fits.forget()
    trainer = fits.trainer(fits.heartbeats(), max_steps=40)
    monkeypatch.setattr(trainer.strategy, "barrier", lambda name=None: fits.calls.append(("barrier", name)))
    trainer.fit(Model(), ckpt_path=str(fits.save_dir / "last.ckpt"))
    assert len(fits.names("calculate_and_set_hb_timeouts")) == 1
    # a heartbeat right before, so that who waited for the others isn't late under the new timeouts
    assert fits.names()[-4:] == [
        "barrier",
        "send_heartbeat",
        "calculate_and_set_hb_timeouts",
        "shutdown_workload_monitoring",
    ]
    assert "Updated FT timeouts" in caplog.text
    plain = learned(fits)["current_timeouts"]["heartbeat"]
    assert plain["were_calculated"] is True

    in_force: list[Any] = []
    callback = fits.heartbeats()
    watcher = Do("on_train_start", lambda _: in_force.append(callback.fault_tol_client.hb_timeouts))
    fits.fit(callback, watcher, max_steps=41)
    assert (in_force[0].initial, in_force[0].subsequent) == (plain["initial"], plain["subsequent"])


@pytest.mark.parametrize(("code", "is_learned"), [(0, True), (1, False)])
def test_heartbeat_timeouts_are_learned_at_sys_exit_with_code_0_only(
    fits: FitBench, code: int, is_learned: bool
) -> None:
    fits.fit(fits.heartbeats(), max_steps=20)
    fits.forget()
    with pytest.raises(SystemExit):
        fits.fit(fits.heartbeats(), Do("on_train_batch_end", lambda _: sys.exit(code), at=15), max_steps=60)
    assert bool(fits.names("calculate_and_set_hb_timeouts")) is is_learned
    assert (fits.save_dir / "_ft_state.json").exists() is is_learned
    assert not fits.flag.exists()


# ---- the file


def test_file_that_cant_be_used_stays_as_it_is(fits: FitBench, caplog: pytest.LogCaptureFixture) -> None:
    file, content = fits.save_dir / "_ft_state_.json", '{"schema": "megatron_ft.ft_state", "schema_version": 99}'
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)
    fits.fit(fits.sections(), max_steps=20)
    assert file.read_text() == content
    assert "leaving it alone" in caplog.text
    assert "Updated FT timeouts" in caplog.text


def test_state_without_exp_dir_goes_beside_the_logs_with_a_hint(
    fits: FitBench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fits.fit(fits.sections(exp_dir=None), max_steps=11)
    assert (tmp_path / "ft_state" / "_ft_state_.json").exists()
    assert "give exp_dir" not in caplog.text
    trainer = Trainer(
        logger=CSVLogger(tmp_path / "csv"),
        accelerator="cpu",
        max_steps=11,
        callbacks=[fits.sections(exp_dir=None), ModelCheckpoint(fits.save_dir)],
        enable_progress_bar=False,
    )
    trainer.fit(Model())
    assert (tmp_path / "csv" / "lightning_logs" / "version_0" / "ft_state" / "_ft_state_.json").exists()
    assert "give exp_dir" in caplog.text  # the next run would have version_1
