"""Real fits in this process: a Lightning trainer on one CPU, a real client, the monitor's part played by the test."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from megatron_ft.integrations import lightning_common
from megatron_ft.integrations.lightning import FaultToleranceCallback, FaultToleranceSectionsCallback
from megatron_ft.rank.client.client import RankMonitorClient
from megatron_ft.rank.hooks import user_errors
from tests.support.lightning_job import Model
from tests.support.training import Bench

FLAG = "FAULT_TOL_FINISHED_FLAG_FILE"


class Do(Callback):
    """Calls ``action(trainer)`` in one hook, the ``at``-th time it is called; 0 is every time."""

    def __init__(self, hook: str, action: Any, at: int = 1) -> None:
        self._calls = 0

        def on_hook(trainer: Any, *args: Any, **kwargs: Any) -> None:
            self._calls += 1
            if at in (0, self._calls):
                action(trainer)

        setattr(self, hook, on_hook)


class FitBench(Bench):
    """Starts fits and sees what they tell the monitor."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(tmp_path, monkeypatch)
        self.config.rank_section_timeouts = {"setup": 60.0, "step": 30.0, "checkpointing": 60.0}
        self.config.rank_out_of_section_timeout = 60.0
        self.flag = tmp_path / "flags" / "finished"
        monkeypatch.setenv(FLAG, str(self.flag))
        self.calls: list[tuple[str, Any]] = []
        calls = self.calls

        class Recording(RankMonitorClient):
            """A real client whose calls are remembered."""

        for name in (
            *("init_workload_monitoring", "shutdown_workload_monitoring", "send_heartbeat", "set_iteration"),
            *("start_section", "end_section", "end_all_sections", "send_workload_control_request"),
            *("calculate_and_set_section_timeouts", "calculate_and_set_hb_timeouts", "load_state_dict"),
        ):
            setattr(Recording, name, _recorded(name, calls))
        for module in (lightning_common, user_errors):
            monkeypatch.setattr(module, "RankMonitorClient", Recording)

    @property
    def save_dir(self) -> Path:
        """Of checkpoints and learned timeouts."""
        return self.tmp_path / "save"

    def sections(self, **more: Any) -> FaultToleranceSectionsCallback:
        """The callback under test."""
        return FaultToleranceSectionsCallback(**{**self._arguments(), **more})

    def heartbeats(self, **more: Any) -> FaultToleranceCallback:
        """The callback under test."""
        return FaultToleranceCallback(**{**self._arguments(), **more})

    def _arguments(self) -> dict[str, Any]:
        return {"autoresume": True, "calculate_timeouts": True, "exp_dir": self.save_dir, "logger_name": "fit"}

    def trainer(self, *callbacks: Callback, save_every: int | None = 10, **more: Any) -> Trainer:
        """On one CPU; the sanity check, a validation every 5 steps, a checkpoint every 10, unless said otherwise."""
        arguments: dict[str, Any] = {"max_steps": 20, "val_check_interval": 5, "limit_val_batches": 3}
        checkpoints = ModelCheckpoint(self.save_dir, every_n_train_steps=save_every, save_last=True)
        return Trainer(
            **{**arguments, **more},
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=save_every is not None,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=self.tmp_path,
            callbacks=[*callbacks, *([checkpoints] if save_every is not None else [])],
        )

    def fit(self, *callbacks: Callback, resume: bool = True, model: Model | None = None, **more: Any) -> Trainer:
        """One fit, from the last checkpoint if there is one."""
        trainer = self.trainer(*callbacks, **more)
        last = self.save_dir / "last.ckpt"
        trainer.fit(model or Model(), ckpt_path=str(last) if resume and last.exists() else None)
        return trainer

    def names(self, *wanted: str) -> list[str]:
        """Names of the calls, in order; of those wanted, if any are given."""
        return [name for name, _ in self.calls if not wanted or name in wanted]

    def transitions(self) -> list[str]:
        """``+name`` for each section opened, ``-name`` for each closed."""
        signs = {"start_section": "+", "end_section": "-"}
        return [f"{signs[name]}{argument}" for name, argument in self.calls if name in signs]

    def arguments_of(self, name: str) -> list[Any]:
        """What each call of that name was given."""
        return [argument for called, argument in self.calls if called == name]

    def open_sections(self) -> list[str]:
        """What was opened and not closed since the last connection."""
        opened: list[str] = []
        for name, argument in self.calls:
            if name in ("init_workload_monitoring", "end_all_sections"):
                opened.clear()
            elif name == "start_section":
                opened.append(argument)
            elif name == "end_section":
                opened.remove(argument)
        return opened

    def forget(self) -> None:
        """Begin a new record."""
        self.calls.clear()
        shutil.rmtree(self.flag.parent, ignore_errors=True)


def _recorded(name: str, calls: list[tuple[str, Any]]) -> Any:
    method = getattr(RankMonitorClient, name)

    def call(self: RankMonitorClient, *args: Any, **kwargs: Any) -> Any:
        calls.append((name, args[0] if args else kwargs or None))
        return method(self, *args, **kwargs)

    return call


@pytest.fixture
def fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> FitBench:
    caplog.set_level(logging.INFO, "fit")
    return FitBench(tmp_path, monkeypatch)
