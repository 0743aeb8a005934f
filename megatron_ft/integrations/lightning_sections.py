"""``FaultToleranceSectionsCallback``: sections during ``trainer.fit``."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron_ft.core.board.intervals import CHECKPOINTING, SECTIONS, SETUP, STEP
from megatron_ft.core.control import WorkloadAction, WorkloadControlRequest
from megatron_ft.core.errors import ConfigError, RankMonitorClientError, show
from megatron_ft.integrations.lightning_common import FitCallback
from megatron_ft.integrations.lightning_faults import SimulatedFaultParams
from megatron_ft.integrations.lightning_packages import names_of_classes
from megatron_ft.learning.rule import facts_of, reasons_against
from megatron_ft.learning.timeouts import OUT_OF_SECTION
from megatron_ft.rank.client.client import RankMonitorClient
from megatron_ft.rank.hooks import safe_calls

__all__ = ["FaultToleranceSectionsCallback", "Sections", "Wrappings"]

_NEVER = -1
"""Value of a batch number before the first event."""


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

    TIMEOUTS_FILENAME = "_ft_state_.json"
    MIN_TR_ITERS_FOR_STEP_TIMEOUT_UPDATE = 16

    def __init__(
        self,
        autoresume: bool,
        calculate_timeouts: bool,
        simulated_fault_params: SimulatedFaultParams | Mapping[str, Any] | None = None,
        exp_dir: str | os.PathLike[str] | None = None,
        logger_name: str | None = "nemo_logger.FaultToleranceCallback",
        exc_handling_policy: Callable[[Any], WorkloadControlRequest | None] | None = None,
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
            exc_handling_policy: called with an exception that ended the fit in this rank. Returns a request to the
            launcher, or None for its restart policy. A ``ShutdownWorkload`` also writes the finished flag, since no
            further job should be started. Not called for ``sys.exit(0)``.

        Raises:
            ConfigError: simulated_fault_params are invalid (a ValueError).
        """
        super().__init__(autoresume, calculate_timeouts, simulated_fault_params, exp_dir, logger_name)
        self.exc_handling_policy = exc_handling_policy
        self._sections: Sections | None = None
        self._wrappings: Wrappings | None = None
        self._saved_at = self._learned_at = _NEVER
        self._is_async_save = False
        self._reasons_given: set[str] = set()

    def on_train_batch_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Close "setup" and report the iteration."""
        self._close_setup()
        super().on_train_batch_start(trainer, *args, **kwargs)

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Learn, on all ranks, after the batch that follows a save (saves come after this hook).

        Learning is a collective. A further save after the same batch, as Lightning may make one when it validates, is
        learned with the next.
        """
        super().on_train_batch_end(trainer, *args, **kwargs)
        if self._learned_at < self._saved_at:
            self._learn(trainer, is_closing=False)
            if self._fit.has_learned and self._sections is not None:
                with self._sections.inside(CHECKPOINTING):
                    self._write_timeouts(self.fault_tol_client)

    def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """Close "setup": the sanity check comes before the first training batch."""
        self._close_setup()

    def _check_config(self, client: RankMonitorClient) -> None:
        assert client.section_timeouts is not None
        configured = set(client.section_timeouts.section)
        if configured != set(SECTIONS):
            missing = f"; not configured: {', '.join(sorted(set(SECTIONS) - configured))}"
            surplus = f"; unknown: {', '.join(sorted(configured - set(SECTIONS)))}"
            self._refuse(
                ConfigError(
                    f"rank_section_timeouts must have the sections {', '.join(SECTIONS)} (null is infinite)"
                    f"{missing if set(SECTIONS) - configured else ''}{surplus if configured - set(SECTIONS) else ''}"
                )
            )
        self._info(f"monitoring begins with {client.section_timeouts}")

    def _begin(self, trainer: Any, client: RankMonitorClient) -> None:
        self._saved_at = self._learned_at = _NEVER
        self._reasons_given = set()
        sections = self._sections = Sections(client)
        wrappings = self._wrappings = Wrappings(sections)
        sections.enter(SETUP)
        epoch_loop = getattr(getattr(trainer, "fit_loop", None), "epoch_loop", None)
        loops = [getattr(epoch_loop, f"{kind}_optimization", None) for kind in ("automatic", "manual")]
        for loop in filter(None, loops):
            wrappings.wrap(loop, "run", STEP)
        if not any(loops):  # a custom train loop: watch the forward pass at least
            wrappings.wrap(trainer.strategy, "training_step", STEP)
        wrappings.wrap(trainer.strategy, "validation_step", STEP)
        # the trainer's method ends with a barrier; in the strategy's only rank 0 may have something to do
        wrappings.wrap(trainer, "save_checkpoint", CHECKPOINTING, after=self._note_save)
        wrappings.wrap(trainer.strategy, "save_checkpoint", CHECKPOINTING)
        wrappings.wrap(trainer.strategy, "remove_checkpoint", CHECKPOINTING)
        checkpoint_io = trainer.strategy.checkpoint_io
        self._is_async_save = _is_asynchronous(checkpoint_io)
        if self._is_async_save:
            for method in ("maybe_finalize_save_checkpoint", "teardown"):  # each may wait for the writer
                if hasattr(checkpoint_io, method):
                    wrappings.wrap(checkpoint_io, method, CHECKPOINTING)

    def _before_end(self) -> None:
        # a fit with nothing to do has never closed "setup"
        if self._sections is not None:
            self._sections.close_all()

    def _retire(self) -> None:
        if self._sections is not None:
            self._sections.retire()
        if self._wrappings is not None:
            self._wrappings.undo()
        self._sections = self._wrappings = None

    def _learn(self, trainer: Any, *, is_closing: bool) -> None:
        client = self.fault_tol_client
        if client is None or not self.calculate_timeouts:
            return
        self._learned_at = self._fit.iterations
        facts = facts_of(
            loaded=self._fit.is_from_disk,
            setup_open=self._sections is not None and self._sections.is_open(SETUP),
            enough_steps=self._fit.iterations >= self.MIN_TR_ITERS_FOR_STEP_TIMEOUT_UPDATE,
            saved=self._saved_at != _NEVER,
            async_saves=self._is_async_save,
        )
        reasons = reasons_against(facts, is_closing=is_closing)
        for reason in reasons.values():
            if reason and reason not in self._reasons_given:
                self._reasons_given.add(reason)
                self._info(reason)
        names = [name for name, reason in reasons.items() if not reason]
        if not names:
            return
        self._info(f"Updating FT timeouts of {', '.join(names)}")
        try:
            client.calculate_and_set_section_timeouts(
                selected_sections=[name for name in names if name != OUT_OF_SECTION],
                calc_out_of_section=OUT_OF_SECTION in names,
            )
        except RankMonitorClientError as error:
            self._warn(f"timeouts were not updated: {error}")
            return
        self._learned(client.section_timeouts)

    def _on_failure(self, exception: BaseException) -> None:
        if self.exc_handling_policy is None or (isinstance(exception, SystemExit) and not exception.code):
            return
        request = self.exc_handling_policy(exception)
        if request is None:
            return
        if not isinstance(request, WorkloadControlRequest):
            raise TypeError(f"exc_handling_policy must return a WorkloadControlRequest or None, not {show(request)}")
        self.logger.info("FT: %s was raised: %s is asked for", type(exception).__name__, request.action.name)
        if request.action is WorkloadAction.ShutdownWorkload:
            why = request.description or type(exception).__name__
            self._write_flag(f"the workload was shut down on request: {why}")
        assert self.fault_tol_client is not None
        self.fault_tol_client.send_workload_control_request(request)

    def _close_setup(self) -> None:
        if self._sections is not None and self._sections.is_open(SETUP):
            self._sections.leave(SETUP)

    def _note_save(self) -> None:
        self._saved_at = self._fit.iterations


class Sections:
    """Reentrant sections of one client: only the outermost entry counts.

    A save may remove another checkpoint, and a tuner trains inside a fit; neither is an error.
    """

    def __init__(self, client: Any) -> None:
        self._client: Any = client
        self._depth: Counter[str] = Counter()

    def is_open(self, name: str) -> bool:
        return self._depth[name] > 0

    def enter(self, name: str) -> None:
        """Open the section, or increase its depth."""
        if self._client is None:
            return
        self._depth[name] += 1
        if self._depth[name] == 1:
            safe_calls.start_section(self._client, name)

    def leave(self, name: str) -> None:
        """Decrease the section's depth, closing it at 0; do nothing if it isn't open."""
        if self._client is None or not self._depth[name]:
            return
        self._depth[name] -= 1
        if not self._depth[name]:
            safe_calls.end_section(self._client, name)

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Keep the section open in a ``with`` block, also when an exception passes."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave(name)

    def close_all(self) -> None:
        if self._client is not None:
            safe_calls.call(self._client.end_all_sections)
        self._depth.clear()

    def retire(self) -> None:
        """Do nothing from now on."""
        self._client = None


class Wrappings:
    """Wraps methods of Lightning, where it has no hooks, to run inside sections until ``undo``."""

    def __init__(self, sections: Sections) -> None:
        self._sections = sections
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def wrap(self, owner: Any, method: str, section: str, *, after: Callable[[], None] | None = None) -> None:
        """Run ``owner.method`` inside a section, and then, if it succeeds, ``after``."""
        original = getattr(owner, method)
        sections = self._sections

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with sections.inside(section):
                result = original(*args, **kwargs)
            if after is not None:
                after()
            return result

        before = vars(owner).get(method)
        setattr(owner, method, wrapped)
        self._replaced.append((owner, method, before, wrapped))

    def undo(self) -> None:
        """Restore the methods. A wrapper that other code has wrapped since stays, but has no effect."""
        while self._replaced:
            owner, method, before, wrapped = self._replaced.pop()
            if vars(owner).get(method) is not wrapped:
                continue
            if before is None:
                delattr(owner, method)
            else:
                setattr(owner, method, before)


def _is_asynchronous(checkpoint_io: Any) -> bool:
    """Return True if a plugin, or one that it wraps, writes checkpoints in the background."""
    while checkpoint_io is not None:
        if hasattr(checkpoint_io, "maybe_finalize_save_checkpoint"):
            return True
        if "AsyncCheckpointIO" in names_of_classes(checkpoint_io):
            return True
        checkpoint_io = getattr(checkpoint_io, "checkpoint_io", None)
    return False
