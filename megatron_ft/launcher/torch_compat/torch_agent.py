"""torch's elastic agent with public methods for its private hooks: abstract ones, and ones to call."""

from __future__ import annotations

import abc
import signal
import subprocess
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import PContext

from megatron_ft.errors import FaultToleranceError
from megatron_ft.launcher.torch_compat import private_names
from megatron_ft.launcher.torch_compat.worker_context import WorkerContext


class TorchAgent(LocalElasticAgent, abc.ABC):
    """The agent of one node. Rank numbering, environment and log files are torch's."""

    def __init__(self, *, grace_s: float, **torch_arguments: Any) -> None:
        super().__init__(**torch_arguments)
        self.grace_s = grace_s
        """Seconds from SIGTERM to SIGKILL, however the ranks end."""

    # -- to be given --------------------------------------------------------------------------------------

    @abc.abstractmethod
    def run_job(self) -> RunResult:
        """Run from the first cycle to the end of the last."""

    @abc.abstractmethod
    def meet(self, rendezvous: Callable[[WorkerGroup], None], group: WorkerGroup) -> None:
        """Number the ranks of ``group`` by torch's ``rendezvous``."""

    @abc.abstractmethod
    def make_ranks(self, *, envs: dict[int, dict[str, str]], **given: Any) -> WorkerContext:
        """Return the ranks of a cycle, not started. ``given``: torch's arguments of ``start_processes``."""

    # -- to be called -------------------------------------------------------------------------------------

    @property
    def spec(self) -> WorkerSpec:
        """torch's specification of the ranks."""
        return self._worker_group.spec

    def start_ranks(self, restarts_left: int) -> None:
        """Meet, make the ranks and start them.

        Raises:
            FaultToleranceError: they can't be started.
            any exception of ``meet`` and ``make_ranks``.
        """
        self._remaining_restarts = restarts_left
        self.forget_store()
        self._initialize_workers(self._worker_group)

    def forget_store(self) -> None:
        """Drop the store in which the ranks met; a launcher that is alone serves it itself."""
        self._store = self._worker_group.store = None

    def end_ranks(self) -> None:
        """End live ranks, and release what belonged to them."""
        self._stop_workers(self._worker_group)

    def set_state(self, state: WorkerState) -> None:
        """Set the state that torch reports of the ranks when the job has ended."""
        self._worker_group.state = state

    def check_none_is_stuck(self) -> None:
        """Apply torch's TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT, off unless the user sets it.

        Raises:
            FaultToleranceError: a rank was stuck in the kernel for that long.
        """
        timeout = getattr(self, "_uninterruptible_state_timeout", 0)
        if timeout > 0 and self._check_uninterruptible_state_timeout(self._worker_group, timeout) is not None:
            raise FaultToleranceError(f"a rank was stuck in the kernel for {timeout:g} s: this node gives up")

    # -- torch's own --------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = "default") -> RunResult:
        return self.run_job()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.meet(super()._rendezvous, worker_group)
        self._store = worker_group.store

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with private_names.workers_started_by(self._start_processes):
            return dict(super()._start_workers(worker_group))

    def _start_processes(self, **given: Any) -> PContext:
        context = self.make_ranks(**given)
        self._pcontext = context  # before the start: if that fails midway, the running ones are ended
        try:
            context.start()
        except (OSError, subprocess.SubprocessError) as error:
            raise FaultToleranceError(f"the ranks can't be started: {error}") from error
        return context

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float | None = None) -> None:
        """End all ranks, however ``run`` ends, even by an unexpected error."""
        private_names.shut_down_agent(super()._shutdown, death_sig, self.grace_s)
