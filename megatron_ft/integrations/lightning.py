"""Callbacks for PyTorch Lightning (``lightning`` and ``pytorch_lightning``), for jobs run with ``ft_launcher``.

    trainer = Trainer(..., callbacks=[FaultToleranceSectionsCallback(autoresume=True, calculate_timeouts=True)])

:class:`FaultToleranceCallback` sends heartbeats, :class:`FaultToleranceSectionsCallback` opens and closes sections;
use one of them. Names, arguments and files are those of ``nvidia_resiliency_ext.ptl_resiliency``. They
monitor ``trainer.fit`` only: ``validate``, ``test`` and ``predict`` need no launcher.

Args:
    autoresume: write the file named by ``FAULT_TOL_FINISHED_FLAG_FILE`` when the training is finished, so that
        the script that starts one job after the other can end (see examples/autoresume).
    calculate_timeouts: learn timeouts, and use those of earlier runs.
    simulated_fault_params: make one rank fail, for a rehearsal; the object or a mapping of its fields.
    exp_dir: directory of learned timeouts, shared by all runs. None is ``ft_state`` in the trainer's ``log_dir``,
        which most loggers number anew in each run.
    logger_name: name of the logger, by default ``nemo_logger.FaultToleranceCallback``.
    exc_handling_policy: called with an exception that ended the fit in this rank. Returns a request to the
        launcher, or None for its restart policy. A ``ShutdownWorkload`` also writes the finished flag, since no
        further job should be started. Not called for ``sys.exit(0)``.
"""

from __future__ import annotations

from typing import Any

from megatron_ft.errors import ConfigError
from megatron_ft.integrations.lightning_common import FitCallback
from megatron_ft.integrations.lightning_packages import names_of_classes
from megatron_ft.integrations.lightning_sections import Sections
from megatron_ft.learning.messages import FACT_SAVED, FACT_SETUP_OPEN
from megatron_ft.learning.rule import reasons_against
from megatron_ft.learning.timeouts import OUT_OF_SECTION
from megatron_ft.link.base.intervals import CHECKPOINTING, SECTIONS, SETUP, STEP
from megatron_ft.link.base.layout import FACT_ASYNC_SAVES, FACT_ENOUGH_STEPS, FACT_LOADED
from megatron_ft.rank.client.client import RankMonitorClient
from megatron_ft.rank.faults.simulated import SimulatedFaultParams
from megatron_ft.rank.hooks import safe_calls

__all__ = ["FaultToleranceCallback", "FaultToleranceSectionsCallback", "SimulatedFaultParams"]


class FaultToleranceCallback(FitCallback):
    """Sends heartbeats during ``trainer.fit``: after each training and validation batch, and around both.

    No heartbeat is sent while a checkpoint is loaded or written: ``initial_rank_heartbeat_timeout`` has to cover the
    start with a load, and ``rank_heartbeat_timeout`` the longest step with a save. With ``calculate_timeouts``, both
    are learned at the end of a fit that has loaded and saved a checkpoint, and used by the next one.
    """

    TIMEOUTS = "hb_timeouts"
    TIMEOUTS_FILENAME = "_ft_state.json"
    MIN_ITERS_FOR_TIMEOUT_UPDATE = 2

    _has_beaten = _has_saved_between = False

    def _beat(self, *args: Any, **kwargs: Any) -> None:
        if self.fault_tol_client is not None:
            safe_calls.call(self.fault_tol_client.send_heartbeat)
            self._has_beaten = True

    on_train_start = on_train_end = _before_end = _beat
    on_validation_start = on_validation_batch_end = on_validation_end = _beat

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(trainer, *args, **kwargs)
        self._beat()

    def on_save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Send a heartbeat between two saves in a row, which are no single long interval."""
        self._has_saved_between = self._has_beaten
        self._beat()

    def _begin(self, trainer: Any, client: RankMonitorClient) -> None:
        self._has_beaten = self._has_saved_between = False
        assert client.hb_timeouts is not None
        if not client.hb_timeouts.are_valid and not self.calculate_timeouts:
            self._refuse(
                RuntimeError(
                    "initial_rank_heartbeat_timeout and rank_heartbeat_timeout must be set, or "
                    "calculate_timeouts=True: as it is, no hang would be detected"
                )
            )

    def _learn(self, trainer: Any, client: RankMonitorClient, *, is_closing: bool) -> None:
        fit = self._fit
        if not fit.is_from_disk or not self._has_saved_between or fit.iterations < self.MIN_ITERS_FOR_TIMEOUT_UPDATE:
            self._info("the timeouts aren't learned: that takes a fit that loads a checkpoint, trains and saves")
            return
        self._info("Updating FT timeouts of heartbeats")
        # the first rank waits for the others, and must not look late under the new timeouts
        trainer.strategy.barrier("megatron_ft: timeouts")
        self._beat()
        self._calculate(client, client.calculate_and_set_hb_timeouts)


class FaultToleranceSectionsCallback(FitCallback):
    """Opens and closes sections during ``trainer.fit``. The configuration must name exactly these three.

    ===============  ================================================================================================
    section          is open
    ===============  ================================================================================================
    "setup"          from the hook ``setup`` to the first training or validation batch
    "step"           in each training batch, from its forward pass to its optimizer step, and in each validation step
    "checkpointing"  while a checkpoint is gathered, written or removed, until all ranks have done so
    ===============  ================================================================================================

    Data loading, other callbacks, logging and epoch ends are out of section. With ``calculate_timeouts`` timeouts are
    learned after saves and at the end of a fit, and used by the next one: "setup" (and, at the end, the time out of
    section) if a checkpoint was loaded, "step" after 16 batches, "checkpointing" if saves aren't asynchronous.
    """

    TIMEOUTS = "section_timeouts"
    TIMEOUTS_FILENAME = "_ft_state_.json"
    MIN_TR_ITERS_FOR_STEP_TIMEOUT_UPDATE = 16

    _sections = Sections(None)
    _saved_at = _learned_at = -1
    """Number of batches before the last save, and before timeouts were learned; -1: never."""
    _is_async_save = False
    _reasons_given: frozenset[str] = frozenset()

    def on_train_batch_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Close "setup" and report the iteration."""
        self._sections.leave(SETUP)
        super().on_train_batch_start(trainer, *args, **kwargs)

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Learn, on all ranks, after the batch that follows a save (saves come after this hook).

        Learning is a collective. A further save after the same batch, as Lightning may make one when it validates, is
        learned with the next.
        """
        super().on_train_batch_end(trainer, *args, **kwargs)
        client = self.fault_tol_client
        if client is not None and self.calculate_timeouts and self._learned_at < self._saved_at:
            self._learn(trainer, client, is_closing=False)
            if self._fit.has_learned:
                with self._sections.inside(CHECKPOINTING):
                    self._write_timeouts(client)

    def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """Close "setup": the sanity check comes before the first training batch."""
        self._sections.leave(SETUP)

    def _begin(self, trainer: Any, client: RankMonitorClient) -> None:
        assert client.section_timeouts is not None
        configured = set(client.section_timeouts.section)
        missing, surplus = sorted(set(SECTIONS) - configured), sorted(configured - set(SECTIONS))
        if missing or surplus:
            self._refuse(
                ConfigError(
                    f"rank_section_timeouts must have the sections {', '.join(SECTIONS)} (null is infinite)"
                    f"{'; not configured: ' if missing else ''}{', '.join(missing)}"
                    f"{'; unknown: ' if surplus else ''}{', '.join(surplus)}"
                )
            )
        self._saved_at = self._learned_at = -1
        self._reasons_given = frozenset()
        sections = self._sections = Sections(client)
        sections.enter(SETUP)
        epoch_loop = getattr(getattr(trainer, "fit_loop", None), "epoch_loop", None)
        loops = [getattr(epoch_loop, f"{kind}_optimization", None) for kind in ("automatic", "manual")]
        for loop in filter(None, loops):
            sections.wrap(loop, "run", STEP)
        if not any(loops):  # a custom train loop: watch the forward pass at least
            sections.wrap(trainer.strategy, "training_step", STEP)
        sections.wrap(trainer.strategy, "validation_step", STEP)
        # the trainer's method ends with a barrier; in the strategy's only rank 0 may have something to do
        sections.wrap(trainer, "save_checkpoint", CHECKPOINTING, after=self._note_save)
        sections.wrap(trainer.strategy, "save_checkpoint", CHECKPOINTING)
        sections.wrap(trainer.strategy, "remove_checkpoint", CHECKPOINTING)
        checkpoint_io = trainer.strategy.checkpoint_io
        self._is_async_save = _is_asynchronous(checkpoint_io)
        if self._is_async_save:
            for method in ("maybe_finalize_save_checkpoint", "teardown"):  # each may wait for the writer
                if hasattr(checkpoint_io, method):
                    sections.wrap(checkpoint_io, method, CHECKPOINTING)

    def _before_end(self) -> None:
        self._sections.close_all()  # a fit with nothing to do has never closed "setup"

    def _retire(self) -> None:
        self._sections.end()

    def _learn(self, trainer: Any, client: RankMonitorClient, *, is_closing: bool) -> None:
        self._learned_at = self._fit.iterations
        facts = (
            FACT_LOADED * self._fit.is_from_disk
            | FACT_SETUP_OPEN * self._sections.is_open(SETUP)
            | FACT_ENOUGH_STEPS * (self._fit.iterations >= self.MIN_TR_ITERS_FOR_STEP_TIMEOUT_UPDATE)
            | FACT_SAVED * (self._saved_at >= 0)
            | FACT_ASYNC_SAVES * self._is_async_save
        )
        reasons = reasons_against(facts, is_closing=is_closing)
        for reason in filter(None, reasons.values()):
            if reason not in self._reasons_given:
                self._info(reason)
        self._reasons_given |= {*reasons.values()}
        names = [name for name, reason in reasons.items() if not reason]
        if names:
            self._info(f"Updating FT timeouts of {', '.join(names)}")
            self._calculate(
                client,
                client.calculate_and_set_section_timeouts,
                selected_sections=[name for name in names if name != OUT_OF_SECTION],
                calc_out_of_section=OUT_OF_SECTION in names,
            )

    def _note_save(self) -> None:
        self._saved_at = self._fit.iterations


def _is_asynchronous(checkpoint_io: Any) -> bool:
    """Return True if a plugin, or one that it wraps, writes checkpoints in the background."""
    while checkpoint_io is not None:
        if hasattr(checkpoint_io, "maybe_finalize_save_checkpoint"):
            return True
        if "AsyncCheckpointIO" in names_of_classes(checkpoint_io):
            return True
        checkpoint_io = getattr(checkpoint_io, "checkpoint_io", None)
    return False
