"""``FaultToleranceCallback``: heartbeats during ``trainer.fit``."""

from __future__ import annotations

from typing import Any

from megatron_ft.core.errors import RankMonitorClientError
from megatron_ft.integrations.lightning_common import FitCallback
from megatron_ft.rank.client.client import RankMonitorClient
from megatron_ft.rank.hooks import safe_calls

__all__ = ["FaultToleranceCallback"]


class FaultToleranceCallback(FitCallback):
    """Sends heartbeats during ``trainer.fit``: after each training and validation batch, and around both.

    No heartbeat is sent while a checkpoint is loaded or written: ``initial_rank_heartbeat_timeout`` has to cover the
    start with a load, and ``rank_heartbeat_timeout`` the longest step with a save. With ``calculate_timeouts``, both
    are learned at the end of a fit that has loaded and saved a checkpoint, and used by the next one.
    """

    TIMEOUTS_FILENAME = "_ft_state.json"
    MIN_ITERS_FOR_TIMEOUT_UPDATE = 2

    _heartbeats = 0
    _has_saved_between = False

    def on_train_start(self, *args: Any, **kwargs: Any) -> None:
        self._beat()

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(trainer, *args, **kwargs)
        self._beat()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._beat()

    def on_validation_start(self, *args: Any, **kwargs: Any) -> None:
        """Send a heartbeat, also in the sanity check."""
        self._beat()

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._beat()

    def on_validation_end(self, *args: Any, **kwargs: Any) -> None:
        self._beat()

    def on_save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Send a heartbeat between two saves in a row, which are no single long interval."""
        if self._heartbeats:
            self._has_saved_between = True
        self._beat()

    def _beat(self) -> None:
        if self.fault_tol_client is not None:
            safe_calls.call(self.fault_tol_client.send_heartbeat)
            self._heartbeats += 1

    def _check_config(self, client: RankMonitorClient) -> None:
        timeouts = client.hb_timeouts
        assert timeouts is not None
        self._info(f"monitoring begins with {timeouts}")
        if not timeouts.are_valid and not self.calculate_timeouts:
            self._refuse(
                RuntimeError(
                    "initial_rank_heartbeat_timeout and rank_heartbeat_timeout must be set, or "
                    "calculate_timeouts=True: as it is, no hang would be detected"
                )
            )

    def _begin(self, trainer: Any, client: RankMonitorClient) -> None:
        self._heartbeats = 0
        self._has_saved_between = False

    def _before_end(self) -> None:
        self._beat()

    def _learn(self, trainer: Any, *, is_closing: bool) -> None:
        client, fit = self.fault_tol_client, self._fit
        if client is None or not self.calculate_timeouts:
            return
        if not fit.is_from_disk or not self._has_saved_between or fit.iterations < self.MIN_ITERS_FOR_TIMEOUT_UPDATE:
            self._info("the timeouts aren't learned: that takes a fit that loads a checkpoint, trains and saves")
            return
        self._info("Updating FT timeouts of heartbeats")
        # the first rank waits for the others, and must not look late under the new timeouts
        trainer.strategy.barrier("megatron_ft: timeouts")
        self._beat()
        try:
            client.calculate_and_set_hb_timeouts()
        except RankMonitorClientError as error:
            self._warn(f"timeouts were not updated: {error}")
            return
        self._learned(client.hb_timeouts)
