"""torch's elastic agent with public methods for its private hooks, and the ranks of a cycle in the form it knows."""

from __future__ import annotations

import abc
import inspect
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, PContext, RunProcsResult

from megatron_ft.errors import FaultToleranceError
from megatron_ft.launcher.base import output_copying
from megatron_ft.launcher.processes.rank_logs import CycleLogs
from megatron_ft.launcher.processes.worker import Worker
from megatron_ft.launcher.torch_compat import private_names
from megatron_ft.link.messages.fork_server_messages import RankSpec
from megatron_ft.link.reactor import Reactor


class WorkerContext(PContext):
    """torch's group of ranks, with this package's way to start, watch and end them.

    Redirects, ``--tee``, error files and line prefixes are torch's own. ``end`` ends ranks; it is called with (workers,
    signal, grace in seconds). ``environment`` is common to all ranks; torch adds each one's own.
    """

    def __init__(
        self,
        *,
        spawn: Callable[[Sequence[RankSpec]], None],
        environment: Mapping[str, str],
        reactor: Reactor,
        end: Callable[[list[Worker], int, float], None],
        numa_options: Any = None,
        logs_specs: CycleLogs,
        **torch_arguments: Any,
    ) -> None:
        super().__init__(logs_specs=logs_specs, **torch_arguments)
        # what is copied for us is started and stopped as torch's are
        self._copies: list[Any] = [*private_names.tail_logs(self), *logs_specs.copied]
        self._spawn = spawn
        self._environment = environment
        self._reactor = reactor
        self._end = end
        self._numa_options = numa_options
        self.workers: dict[int, Worker] = {}
        """Ranks that ``spawn`` has started."""

    def start(self) -> None:
        """Start all ranks, then the copying of their output. Signal handlers stay ours, which torch would take here."""
        self._start()
        for tail_log in self._copies:
            tail_log.start()

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """End all ranks, then wait a moment for the copying of their output, which goes on by itself."""
        self._close(death_sig or signal.SIGTERM, timeout)
        output_copying.ENDS.do(self._stop_tail_logs)
        output_copying.ENDS.wait(output_copying.COPY_S)

    def _stop_tail_logs(self) -> None:
        """Wait until all output of the ranks is copied."""
        for tail_log in self._copies:
            tail_log.stop()
        for name in ("filtered_stdout", "filtered_stderr"):
            file = getattr(self, name, None)  # torch 2.6 has neither
            if file is not None:
                file.close()

    def _start(self) -> None:
        assert not self.workers, "a group of ranks starts once"
        assert isinstance(self.entrypoint, str), "functions are started by torch itself"
        specs = [
            RankSpec(
                local_rank=local_rank,
                argv=self._numa_bound([self.entrypoint, *map(str, self.args[local_rank])], local_rank),
                env={**self._environment, **self.envs[local_rank]},
                stdout=self.stdouts[local_rank] or None,
                stderr=self.stderrs[local_rank] or None,
            )
            for local_rank in range(self.nprocs)
        ]
        self._spawn(specs)

    def _numa_bound(self, argv: list[str], local_rank: int) -> list[str]:
        """Return the command of a rank, bound to its GPU's CPUs if ``--numa-binding`` asks for it.

        Raises:
            RuntimeError: this torch binds in another way.
        """
        if self._numa_options is None:
            return argv
        from torch.numa import binding

        wrap = getattr(binding, "_maybe_wrap_command_args_with_numa_binding", None)
        if wrap is None:
            raise RuntimeError(f"--numa-binding isn't possible with torch {torch.__version__}")
        return list(wrap(tuple(argv), gpu_index=local_rank, numa_options=self._numa_options))

    def _poll(self) -> RunProcsResult | None:
        """Report the end of all ranks, for torch's interface only; the agent reads ``workers``."""
        running = [worker for worker in self.workers.values() if not worker.poll_end()]
        return None if running else RunProcsResult(return_values=dict.fromkeys(self.workers))

    def pids(self) -> dict[int, int]:
        """Return the PIDs by local rank."""
        return {local_rank: worker.pid for local_rank, worker in self.workers.items()}

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        unreaped = [worker for worker in self.workers.values() if not worker.reaped]
        if unreaped:
            self._end(unreaped, death_sig, timeout)
        for worker in self.workers.values():
            if not worker.reaped:  # it could not be ended; the descriptor stays open, and isn't watched
                self._reactor.unwatch(worker.pidfd)


class TorchAgent(LocalElasticAgent, abc.ABC):
    """The agent of one node. Rank numbering, environment and log files are torch's."""

    grace_s: float
    """Seconds from SIGTERM to SIGKILL, however the ranks end."""

    # -- to be given --------------------------------------------------------------------------------------

    @abc.abstractmethod
    def run_job(self) -> RunResult:
        """Run from the first cycle to the end of the last."""

    @abc.abstractmethod
    def meet(self, rendezvous: Callable[[WorkerGroup], None], group: WorkerGroup) -> None:
        """Number the ranks of ``group`` by torch's ``rendezvous``."""

    @abc.abstractmethod
    def make_ranks(self, *, envs: dict[int, dict[str, str]], logs_specs: LogsSpecs, **given: Any) -> WorkerContext:
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

    def end_ranks(self, grace_s: float) -> None:
        """End live ranks, and release what belonged to them."""
        self.grace_s = grace_s
        self._shutdown()

    def set_state(self, state: WorkerState) -> None:
        """Set the state that torch reports of the ranks when the job has ended."""
        self._worker_group.state = state

    # -- torch's own --------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = "default") -> RunResult:
        return self.run_job()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.meet(super()._rendezvous, worker_group)
        self._store = worker_group.store

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with private_names.replaced(private_names.local_elastic_agent, "start_processes", self._start_processes):
            return dict(super()._start_workers(worker_group))

    def _start_processes(self, **given: Any) -> PContext:
        context = self.make_ranks(**given)
        self._pcontext = context  # before the start: if that fails midway, the running ones are ended
        try:
            context.start()
        except (OSError, subprocess.SubprocessError) as error:
            raise FaultToleranceError(f"the ranks can't be started: {error}") from error
        return context

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float | None = None) -> None:
        """End all ranks, however ``run`` ends, even by an unexpected error."""
        takes_timeout = "timeout" in inspect.signature(super()._shutdown).parameters  # only newer versions do
        super()._shutdown(death_sig, *([self.grace_s] if takes_timeout else []))  # type: ignore[arg-type]
