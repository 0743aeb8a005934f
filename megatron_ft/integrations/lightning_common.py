"""Base of both Lightning callbacks: connects for a fit, keeps timeouts, writes the finished flag, disconnects."""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron_ft.errors import ConfigError, RankMonitorClientError, show
from megatron_ft.integrations import local_checkpoints
from megatron_ft.integrations.lightning_finished import why_finished, withdraw_flag, write_flag_of_fit
from megatron_ft.integrations.lightning_packages import LightningCallback, names_of_classes
from megatron_ft.learning import timeouts as learned
from megatron_ft.learning.state_file import carry_out
from megatron_ft.learning.timeouts import OUT_OF_SECTION, SectionTimeouts, StateFile, state_to_dict
from megatron_ft.link.base.control import WorkloadAction, WorkloadControlRequest
from megatron_ft.rank.base import agreement, say, user_code
from megatron_ft.rank.base.connection import has_launcher
from megatron_ft.rank.client.client import RankMonitorClient
from megatron_ft.rank.crash_reporter import reporter
from megatron_ft.rank.faults import simulated
from megatron_ft.rank.faults.simulated import SimulatedFaultParams
from megatron_ft.rank.hooks import safe_calls
from megatron_ft.rank.hooks.finished import FINISHED_FLAG, write_flag
from megatron_ft.rank.hooks.user_errors import ask_for_no_restart, no_restart_for_mistakes


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
    may_write: bool = True
    """False if there is a file that can't be used: it is left alone."""


class FitCallback(LightningCallback):
    """Monitors ``trainer.fit`` only. Lightning's hooks that subclasses don't need do nothing."""

    TIMEOUTS: str
    """Name of the client's attribute that holds the timeouts in use."""
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
        exc_handling_policy: Callable[[Any], WorkloadControlRequest | None] | None = None,
    ) -> None:
        """Create the callback without any I/O; the arguments are those of `megatron_ft.integrations.lightning`.

        Raises:
            ConfigError: simulated_fault_params aren't such parameters (a ValueError).
        """
        self.logger = logging.getLogger(logger_name)
        self.autoresume = autoresume
        self.calculate_timeouts = calculate_timeouts
        if simulated_fault_params is not None and not isinstance(simulated_fault_params, SimulatedFaultParams):
            try:
                simulated_fault_params = SimulatedFaultParams(**simulated_fault_params)
            except TypeError as error:
                raise ConfigError(f"simulated_fault_params: {error}") from None
        self.simulated_fault_params = simulated_fault_params
        self.exp_dir = Path(exp_dir) if exp_dir else None
        self.exc_handling_policy = exc_handling_policy
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
            self._change_flag(withdraw_flag, "another fit begins: the flag of the last one is removed")
        self._fit = Fit()
        client = self.fault_tol_client = RankMonitorClient()
        user_code.reports_iterations = True
        try:
            client.init_workload_monitoring()
            self._prepare(trainer, client)
        except BaseException:  # whatever it was, a rank outside its fit must not look hung
            self._disconnect()
            raise
        _keep_stack_signals(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """At the end of a fit without an exception: write the flag, learn timeouts (a collective), disconnect."""
        client = self.fault_tol_client
        if stage != "fit" or client is None:
            return
        # Lightning calls this hook while it handles that exception
        is_cut_short = "_TunerExitException" in names_of_classes(sys.exc_info()[1])
        try:
            self._before_end()
            if self.autoresume:
                # other ranks may be at their last save: a flag before it would end the training without it
                trainer.strategy.barrier("megatron_ft: end of fit")
                fit = self._fit
                reason = why_finished(
                    trainer, iterations=fit.iterations, is_resumed=fit.is_resumed, is_cut_short=is_cut_short
                )
                if reason is None:
                    self._info("the training isn't finished: a further job can go on")
                elif trainer.is_global_zero:
                    reason = f"the training is finished: {reason}"
                    self._change_flag(functools.partial(write_flag_of_fit, reason), reason)
            if self.calculate_timeouts:
                self._learn(trainer, client, is_closing=True)
        finally:
            self._disconnect()
        self._write_timeouts(client)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Disconnect. Timeouts are learned only if ``sys.exit(0)``, on all ranks, ended the fit."""
        client = self.fault_tol_client
        if client is None:
            return
        is_clean = isinstance(exception, SystemExit) and not exception.code
        try:
            self._before_end()
            # by exact type: Lightning's SIGTERMException is a SystemExit too, but ranks raise it at different steps
            if is_clean and type(exception) is SystemExit and self.calculate_timeouts:
                self._learn(trainer, client, is_closing=True)
            elif not is_clean and self.exc_handling_policy is not None:
                self._ask_policy(self.exc_handling_policy, exception)
        except Exception as error:  # noqa: BLE001 - the exception that ends the fit is the one that has to be seen
            self.logger.error("FT: %s while handling %s: %s", type(error).__name__, type(exception).__name__, error)
        finally:
            self._disconnect(exception)
        self._write_timeouts(client)

    def on_train_batch_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Report the iteration."""
        if self.fault_tol_client is not None:
            safe_calls.call(self.fault_tol_client.set_iteration, trainer.global_step)
        simulated.on_step()

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self._fit.iterations += 1

    def on_load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Note that this fit resumes from a checkpoint. (A tuner loads one after its trial steps.)"""
        if not self._fit.iterations:
            self._fit.is_resumed = True
            self._fit.is_from_disk = not local_checkpoints.is_loaded()

    # ---- what subclasses do

    def _begin(self, trainer: Any, client: RankMonitorClient) -> None:
        """Prepare for a fit; call ``_refuse`` if the timeouts in force can't be intended."""

    def _before_end(self) -> None:
        """Act at the end of a fit, while still connected."""

    def _learn(self, trainer: Any, client: RankMonitorClient, *, is_closing: bool) -> None:
        """Calculate timeouts, a collective, if enough was observed."""

    def _retire(self) -> None:
        """Clean up before the client is shut down."""

    # ---- helpers

    def _prepare(self, trainer: Any, client: RankMonitorClient) -> None:
        """Load learned timeouts and check the configuration, between connecting and the start of the fit."""
        # a trainer's log_dir is a collective (one broadcast)
        directory = self.exp_dir or Path(trainer.log_dir or trainer.default_root_dir) / self.FT_DIR_NAME
        self.timeouts_file_path = directory / self.TIMEOUTS_FILENAME
        if self.calculate_timeouts:
            # Lightning's loggers number it: the next run uses another one
            if self.exp_dir is None and re.fullmatch(r"version_\d+", directory.parent.name):
                self._warn(f"the next run won't find the timeouts learned in this one, in {directory}: give exp_dir")
            self._load_timeouts(client, str(self.timeouts_file_path))
        self._begin(trainer, client)
        self._info(f"monitoring begins with {getattr(client, self.TIMEOUTS)}")
        if self.simulated_fault_params is not None:
            with no_restart_for_mistakes():
                simulated.start(self.simulated_fault_params, client=lambda: self.fault_tol_client)

    def _refuse(self, error: Exception) -> NoReturn:
        """Raise a user error after asking the launcher not to restart, since a restart would fail again."""
        ask_for_no_restart(str(error))
        raise error

    def _disconnect(self, error: BaseException | None = None) -> None:
        """End the monitoring; ``error`` has ended the fit."""
        client, self.fault_tol_client = self.fault_tol_client, None
        self._retire()
        if client is not None and error is not None:
            safe_calls.call(client._leave, error)
        elif client is not None:
            safe_calls.call(client.shutdown_workload_monitoring)

    def _ask_policy(self, policy: Callable[[Any], WorkloadControlRequest | None], exception: BaseException) -> None:
        request = policy(exception)
        if request is None:
            return
        if not isinstance(request, WorkloadControlRequest):
            raise TypeError(f"exc_handling_policy must return a WorkloadControlRequest or None, not {show(request)}")
        self.logger.info("FT: %s was raised: %s is asked for", type(exception).__name__, request.action.name)
        if request.action is WorkloadAction.ShutdownWorkload:
            reason = f"the workload was shut down on request: {request.description or type(exception).__name__}"
            self._change_flag(functools.partial(write_flag, reason), reason)
        assert self.fault_tol_client is not None
        self.fault_tol_client.send_workload_control_request(request)

    def _change_flag(self, change: Callable[[], str | None], why: str) -> None:
        """Write or remove the file that ends the loop of jobs, and log it."""
        try:
            path = change()
        except OSError as error:
            self.logger.error("FT: %s: %s: %s", os.environ[FINISHED_FLAG], error.strerror or error, why)
        else:
            if path is not None:
                self.logger.info("FT: %s (%s)", why, path)

    def _load_timeouts(self, client: RankMonitorClient, path: str) -> None:
        """Load the file's timeouts, the same on all ranks: rank 0 reads it and broadcasts the content."""
        found = StateFile(path)
        if agreement.rank() == 0 or not agreement.has_process_group():
            found = carry_out(found)
        found = agreement.from_rank_0(found)
        self._fit.may_write = not found.problem
        if found.problem:
            self._warn(f"{found.problem}. Continuing with the configured timeouts")
        if found.state is None:
            return
        assert client.cfg is not None
        state, superseded = learned.that_applies(found.state, learned.configured_of(client.cfg.to_dict()))
        for line in superseded:
            self._warn(line)
        if state.timeouts or state.heartbeats is not None:
            # as calculated, without the floor: the client applies it, and goes on from these
            assert client.section_timeouts is not None
            known = {*client.section_timeouts.section, OUT_OF_SECTION}
            calculated = {name: timeout_s for name, timeout_s in state.timeouts.items() if name in known}
            sections = SectionTimeouts().with_calculated(calculated)
            client.load_state_dict(state_to_dict(state.heartbeats, sections))
            summary = ", ".join(f"{name} {value:.4g} s" for name, value in calculated.items())
            self._info(f"timeouts loaded from {path}: {summary or 'heartbeats'}")

    def _calculate(self, client: RankMonitorClient, calculate: Callable[..., object], **selected: Any) -> None:
        """Calculate timeouts (a collective), and log them."""
        try:
            calculate(**selected)
        except RankMonitorClientError as error:
            self._warn(f"timeouts were not updated: {error}")
            return
        self._fit.has_learned = True
        self._info(f"Updated FT timeouts: {getattr(client, self.TIMEOUTS)}")

    def _write_timeouts(self, client: RankMonitorClient) -> None:
        """Write new timeouts to the file, on rank 0."""
        has_learned, self._fit.has_learned = self._fit.has_learned, False
        if not has_learned or not self._fit.may_write or agreement.rank() != 0:
            return
        assert self.timeouts_file_path is not None
        assert client.cfg is not None
        # ft_state.json's document with the client's plain state, as nvidia-resiliency-ext's callbacks write and read it
        plain = client.state_dict()
        configured = learned.configured_of(client.cfg.to_dict())
        document = {**learned.parse(plain).document(configured, client.cfg.learned_floor), **plain}
        if problem := carry_out(StateFile(str(self.timeouts_file_path), document)).problem:
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
