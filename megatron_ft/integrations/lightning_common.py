"""Base of both Lightning callbacks: connects for a fit, keeps timeouts, writes the finished flag, disconnects."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec.structs import replace

from megatron_ft.core.errors import ConfigError
from megatron_ft.integrations import lightning_faults, local_checkpoints
from megatron_ft.integrations.lightning_faults import SimulatedFaultParams
from megatron_ft.integrations.lightning_finished import end_of_fit, why_finished, withdraw_flag, write_flag_of_fit
from megatron_ft.integrations.lightning_packages import LightningCallback, is_tuner_exit
from megatron_ft.ipc.files.state_file import carry_out
from megatron_ft.learning import state as learned
from megatron_ft.learning.launcher_part import StateFile, StateFileDone
from megatron_ft.learning.timeouts import OUT_OF_SECTION, SectionTimeouts, state_to_dict
from megatron_ft.rank.base import agreement, say, user_code
from megatron_ft.rank.base.connection import has_launcher
from megatron_ft.rank.client.client import RankMonitorClient
from megatron_ft.rank.crash_reporter import reporter
from megatron_ft.rank.hooks import safe_calls
from megatron_ft.rank.hooks.finished import FINISHED_FLAG, write_flag
from megatron_ft.rank.hooks.user_errors import ask_for_no_restart, why_unusable

__all__ = ["FINISHED_FLAG", "Fit", "FitCallback"]


@dataclass
class Fit:
    """State of one fit so far."""

    iterations: int = 0
    """Batches trained."""
    is_resumed: bool = False
    """True if a checkpoint was loaded."""
    is_from_disk: bool = False
    """True if it was no local checkpoint, which is loaded so fast that no timeout is learned from it."""
    has_learned: bool = False
    """True if new timeouts aren't in the file yet."""


class FitCallback(LightningCallback):
    """Monitors ``trainer.fit`` only. Lightning's hooks that subclasses don't need do nothing."""

    TIMEOUTS_FILENAME: str
    """Name of the file of learned timeouts, in ``exp_dir``."""
    FT_DIR_NAME = "ft_state"
    """Directory of that file, in the trainer's ``log_dir``, if no ``exp_dir`` is given."""

    def __init__(
        self,
        autoresume: bool,
        calculate_timeouts: bool,
        simulated_fault_params: SimulatedFaultParams | Mapping[str, Any] | None = None,
        exp_dir: str | os.PathLike[str] | None = None,
        logger_name: str | None = "nemo_logger.FaultToleranceCallback",
    ) -> None:
        """Create the callback without any I/O.

        Args:
            autoresume: write the file named by ``FAULT_TOL_FINISHED_FLAG_FILE`` when the training is finished, so that
            the script that starts one job after the other can end (see examples/autoresume).
            calculate_timeouts: learn timeouts, and use those of earlier runs.
            simulated_fault_params: make one rank fail, for a rehearsal; the object or a mapping of its fields.
            exp_dir: directory of learned timeouts, shared by all runs. None is ``ft_state`` in the trainer's
            ``log_dir``, which most loggers number anew in each run.
            logger_name: name of this callback's logger.

        Raises:
            ConfigError: simulated_fault_params are invalid (a ValueError).
        """
        self.logger = logging.getLogger(logger_name)
        self.autoresume = autoresume
        self.calculate_timeouts = calculate_timeouts
        self.simulated_fault_params = lightning_faults.parse(simulated_fault_params)
        self.exp_dir = Path(exp_dir) if exp_dir else None
        self.timeouts_file_path: Path | None = None
        self.fault_tol_client: RankMonitorClient | None = None
        self._fit = Fit()

    @property
    def is_initialized(self) -> bool:
        """True while a fit is monitored."""
        return self.fault_tol_client is not None

    # ---- Lightning's hooks

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Connect to the monitor, if this is a fit. Without ``ft_launcher``, warn and do nothing.

        Raises:
            RankMonitorClientError: the monitor refuses the rank; or there is no launcher, and FT_REQUIRE_LAUNCHER is 1.
            RuntimeError, ValueError: a setting is missing or invalid; the launcher is asked not to restart.
        """
        if stage != "fit":
            return
        self._disconnect()  # from a fit that was left without its teardown
        say.forget()
        if not has_launcher():
            return
        if self.autoresume and not os.environ.get(FINISHED_FLAG):
            self._refuse(
                RuntimeError(
                    f"autoresume=True needs {FINISHED_FLAG}, the path of the file that says that the training is "
                    "finished, in the environment (see examples/autoresume), but it is not set"
                )
            )
        if self.autoresume:
            self._withdraw_flag()
        self._fit = Fit()
        client = self.fault_tol_client = RankMonitorClient()
        user_code.note_iterations(True)
        try:
            client.init_workload_monitoring()
            self._prepare(trainer, client)
        except BaseException:  # whatever it was, a rank outside its fit must not look hung
            self._disconnect()
            raise
        _keep_stack_signals(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """At the end of a fit without an exception: write the flag, learn timeouts (a collective), disconnect."""
        if stage != "fit" or self.fault_tol_client is None:
            return
        # Lightning calls this hook while it handles that exception
        is_cut_short = is_tuner_exit(sys.exc_info()[1])
        try:
            self._before_end()
            if self.autoresume:
                # other ranks may be at their last save: a flag before it would end the training without it
                trainer.strategy.barrier("megatron_ft: end of fit")
                self._say_if_finished(trainer, is_cut_short)
            self._learn(trainer, is_closing=True)
        finally:
            client = self._disconnect()
        self._write_timeouts(client)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Disconnect. Timeouts are learned only if ``sys.exit(0)``, on all ranks, ended the fit."""
        if self.fault_tol_client is None:
            return
        # by exact type: Lightning's SIGTERMException is a SystemExit too, but ranks raise it at different steps
        is_clean = type(exception) is SystemExit and not exception.code
        try:
            self._before_end()
            if is_clean:
                self._learn(trainer, is_closing=True)
            self._on_failure(exception)
        except Exception as error:  # noqa: BLE001 - the exception that ends the fit is the one that has to be seen
            self.logger.error("FT: %s while handling %s: %s", type(error).__name__, type(exception).__name__, error)
        finally:
            client = self._disconnect(exception)
        self._write_timeouts(client)

    def on_train_batch_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Report the iteration."""
        if self.fault_tol_client is not None:
            safe_calls.call(self.fault_tol_client.set_iteration, trainer.global_step)

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self._fit.iterations += 1

    def on_load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Note that this fit resumes from a checkpoint. (A tuner loads one after its trial steps.)"""
        if not self._fit.iterations:
            self._fit.is_resumed = True
            self._fit.is_from_disk = not local_checkpoints.is_loaded()

    # ---- what subclasses do

    def _check_config(self, client: RankMonitorClient) -> None:
        """Call ``_refuse`` if the timeouts in force can't be intended."""

    def _begin(self, trainer: Any, client: RankMonitorClient) -> None:
        """Prepare for a fit."""

    def _before_end(self) -> None:
        """Act at the end of a fit, while still connected."""

    def _learn(self, trainer: Any, *, is_closing: bool) -> None:
        """Calculate timeouts, a collective, if enough was observed."""

    def _on_failure(self, exception: BaseException) -> None:
        """Act on an exception that has ended the fit."""

    def _retire(self) -> None:
        """Clean up before the client is shut down."""

    # ---- helpers

    def _prepare(self, trainer: Any, client: RankMonitorClient) -> None:
        """Load learned timeouts and check the configuration, between connecting and the start of the fit."""
        # a trainer's log_dir is a collective (one broadcast)
        directory = self.exp_dir or Path(trainer.log_dir or trainer.default_root_dir) / self.FT_DIR_NAME
        self.timeouts_file_path = directory / self.TIMEOUTS_FILENAME
        if self.calculate_timeouts:
            problem = why_unusable(directory, create=agreement.rank() == 0)
            if problem is not None:
                self._refuse(ConfigError(problem))
            if self.exp_dir is None and _is_versioned(directory):
                self._warn(f"the next run won't find the timeouts learned in this one, in {directory}: give exp_dir")
            self._load_timeouts(client, str(self.timeouts_file_path))
        self._check_config(client)
        if self.simulated_fault_params is not None:
            lightning_faults.start(self.simulated_fault_params, lambda: self.fault_tol_client)
        self._begin(trainer, client)

    def _refuse(self, error: Exception) -> NoReturn:
        """Raise a user error after asking the launcher not to restart, since a restart would fail again."""
        ask_for_no_restart(str(error))
        raise error

    def _disconnect(self, error: BaseException | None = None) -> RankMonitorClient | None:
        """End the monitoring; ``error`` has ended the fit."""
        client, self.fault_tol_client = self.fault_tol_client, None
        self._retire()
        if client is not None and error is not None:
            safe_calls.call(client._leave, error)
        if client is not None:
            safe_calls.call(client.shutdown_workload_monitoring)
        return client

    def _say_if_finished(self, trainer: Any, is_cut_short: bool) -> None:
        fit = self._fit
        end = end_of_fit(trainer, iterations=fit.iterations, is_resumed=fit.is_resumed, is_cut_short=is_cut_short)
        reason = why_finished(end)
        if reason is None:
            self._info("the training isn't finished: a further job can go on")
        elif trainer.is_global_zero:
            self._write_flag(f"the training is finished: {reason}", write=write_flag_of_fit)

    def _withdraw_flag(self) -> None:
        """Remove the flag of the previous fit: the training isn't finished if this fit is interrupted."""
        try:
            path = withdraw_flag()
        except OSError as error:
            path = os.environ[FINISHED_FLAG]
            self.logger.error("FT: %s, written after the last fit, can't be removed: %s", path, error.strerror or error)
        else:
            if path is not None:
                self.logger.info("FT: another fit begins, so %s, written after the last one, is removed", path)

    def _write_flag(self, reason: str, write: Callable[[str], str | None] = write_flag) -> None:
        """Write the file that ends the loop of jobs, with the reason as its content."""
        try:
            path = write(reason)
        except OSError as error:
            path = os.environ[FINISHED_FLAG]
            self.logger.error("FT: %s can't be written (%s): %s", path, error.strerror or error, reason)
        else:
            if path is not None:
                self.logger.info("FT: %s, so %s is written", reason, path)

    def _load_timeouts(self, client: RankMonitorClient, path: str) -> None:
        """Load the file's timeouts, the same on all ranks: rank 0 reads it and broadcasts the content."""
        found = StateFileDone(StateFile(path, sets_aside=True))
        if agreement.rank() == 0 or not agreement.has_process_group():
            found = carry_out(found.of)
        found = agreement.from_rank_0(found)
        if found.problem:
            self._warn(f"{found.problem}. Continuing with the configured timeouts")
        if found.state is None:
            return
        state, superseded = learned.that_applies(found.state, _configured(client))
        for line in superseded.values():
            self._warn(line)
        if state.timeouts or state.heartbeats is not None:
            # as calculated, without the floor: the client applies it, and goes on from these
            assert client.section_timeouts is not None
            known = {*client.section_timeouts.section, OUT_OF_SECTION}
            calculated = {name: each.calculated_s for name, each in state.timeouts.items() if name in known}
            sections = SectionTimeouts().with_calculated(calculated)
            client.load_state_dict(state_to_dict(state.client_heartbeats, sections))
            summary = ", ".join(f"{name} {learned.shown_s(value)}" for name, value in calculated.items())
            self._info(f"timeouts loaded from {path}: {summary or 'heartbeats'}")

    def _learned(self, timeouts: object) -> None:
        """Note and log new timeouts."""
        self._fit.has_learned = True
        self._info(f"Updated FT timeouts: {timeouts}")

    def _write_timeouts(self, client: RankMonitorClient | None) -> None:
        """Write new timeouts to the file, on rank 0."""
        if client is None or not self._fit.has_learned:
            return
        self._fit.has_learned = False
        if agreement.rank() != 0:
            return
        assert self.timeouts_file_path is not None
        if problem := _save(client, self.timeouts_file_path).problem:
            self._warn(f"{problem}. The next run won't know these timeouts")

    def _info(self, text: str) -> None:
        if agreement.rank() == 0:
            self.logger.info("FT: %s", text)

    def _warn(self, text: str) -> None:
        if agreement.rank() == 0:
            self.logger.warning("FT: %s", text)


def _keep_stack_signals(trainer: Any) -> None:
    """Install the signals for stacks again when Lightning, at the end of the fit, has reset all signals."""
    connector = getattr(trainer, "_signal_connector", None)
    teardown = getattr(connector, "teardown", None)
    if connector is None or not callable(teardown):
        return

    def restoring() -> None:
        vars(connector).pop("teardown", None)
        teardown()
        safe_calls.call(reporter.restore_signals)

    connector.teardown = restoring


def _is_versioned(directory: Path) -> bool:
    """Return True if Lightning's loggers number this directory: the next run uses another and finds no file."""
    return re.fullmatch(r"version_\d+", directory.parent.name) is not None


def _configured(client: RankMonitorClient) -> learned.Configured:
    """Return the timeouts that the user has set."""
    assert client.cfg is not None
    return learned.Configured.of(client.cfg.to_dict())


def _save(client: RankMonitorClient, path: Path) -> StateFileDone:
    """Write the client's calculated timeouts to the file. Only rank 0 may call this.

    The file is ``ft_state.json``'s document with the client's plain state added under "current_timeouts", as
    nvidia-resiliency-ext's callbacks write and read it.
    """
    plain, size = client.state_dict(), agreement.world_size()
    state = replace(learned.parse(plain), configured_s=_configured(client), world_size=size)
    return carry_out(StateFile(str(path), {**msgspec.to_builtins(state), **plain}))
