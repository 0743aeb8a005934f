"""torch's elastic agent with our eyes and hands: knows ends at once, ends whole groups, says what happened."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import time
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousGracefulExitError

from megatron_ft.core.control import WorkloadAction
from megatron_ft.core.errors import FaultToleranceError
from megatron_ft.core.exit_description import Cause, CauseKind
from megatron_ft.core.restart_policy import Action, CycleEnd, Decision, GroupView, Outcome
from megatron_ft.launcher import announce, lines, torch_private
from megatron_ft.launcher.control import ReceivedRequest
from megatron_ft.launcher.cycle_record import CycleRecord
from megatron_ft.launcher.node import Node
from megatron_ft.launcher.rounds import MembershipWatch, agree_on_cycle
from megatron_ft.launcher.workers import Worker, WorkerContext

_HUNG_AND_ALIVE_S = 20.0
"""After a verdict the monitor signals, and kills after a grace of 5 s; then its rank should be gone."""

__all__ = ["FaultTolerantAgent", "NodeNotNeededError", "WorkloadShutDownError"]


class WorkloadShutDownError(FaultToleranceError):
    """A rank asked for the end of the job."""


class NodeNotNeededError(FaultToleranceError):
    """The job ended without ever needing this node."""


class FaultTolerantAgent(LocalElasticAgent):
    """One node's agent. Its rendezvous, rank numbering, environment and log files are torch's."""

    def __init__(self, *, node: Node, **torch_arguments: Any) -> None:
        super().__init__(**torch_arguments)
        self._node = node
        self._handler = self._worker_group.spec.rdzv_handler
        self._history: list[CycleEnd] = []
        self._cycle = 0
        self._record: CycleRecord | None = None
        self._membership: MembershipWatch | None = None
        self._last_membership: MembershipWatch | None = None
        node.monitors.on_message = self._heard_of
        node.control.on_request = self._asked

    # -- torch's loop -------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = "default") -> RunResult:
        while True:
            self._node.raise_if_asked_to_stop()
            self._initialize_workers(self._worker_group)
            announce.cycle_started(self._node, self._current(), self._worker_group, self._remaining_restarts)
            try:
                outcome = self._end_cycle(self._watch())
            except RendezvousError as error:
                self._log_lost(error)
                raise
            record = self._current()
            self._history.append(CycleEnd(cycle=record.cycle, outcome=outcome))
            decision = self._decide()
            if outcome is Outcome.SUCCEEDED:
                return self._succeeded(record, decision)
            cause = self._cause(outcome)
            announce.cycle_ended(self._node, record, outcome, decision, cause)
            self._worker_group.state = WorkerState.FAILED
            self._node.raise_if_asked_to_stop()
            if outcome is Outcome.STOPPED:
                raise WorkloadShutDownError(cause.text)
            self._check_all_are_gone()
            if decision.action is Action.GIVE_UP:
                return RunResult(state=WorkerState.FAILED, failures=record.torch_failures(cause))
            self._remaining_restarts = decision.restarts_left

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        node, nodes = self._node, self._node.line.max_nodes
        self._node.ranks_ended_well = False
        self._store = worker_group.store = None  # a store that nobody holds gives its port back
        warning = torch_private.fresh_store(self._handler, nodes=nodes)
        if warning and not self._history:
            node.say(warning)

        def meet() -> int:
            if self._last_membership is not None:
                self._last_membership.join()
            with torch_private.quick_first_round(nodes=nodes):
                super(FaultTolerantAgent, self)._rendezvous(worker_group)
            return agree_on_cycle(
                worker_group.store,
                backend=self._handler.get_backend(),
                run_id=self._handler.get_run_id(),
                group_rank=worker_group.group_rank or 0,
                own_count=len(self._history),
            )

        try:
            self._cycle = node.blocking(meet)
        except RendezvousGracefulExitError as error:
            raise NodeNotNeededError(str(error)) from error

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._record = CycleRecord(
            self._cycle,
            [worker.global_rank for worker in worker_group.workers],
            snapshot=lambda local_rank: self._node.monitors.snapshot(local_rank, self._cycle),
            log=self._node.log,
        )
        with torch_private.workers_started_by(self._start_processes):
            pids: dict[int, Any] = super()._start_workers(worker_group)
        return pids

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float | None = None) -> None:
        """Also for what nobody foresaw: whatever ends ``run``, no rank outlives it."""
        torch_private.shut_down_agent(super()._shutdown, death_sig, self._node.line.stop_timeout)
        self._stop_membership()

    # -- one cycle ----------------------------------------------------------------------------------------

    def _start_processes(
        self, *, envs: dict[int, dict[str, str]], start_method: str = "", **torch_arguments: Any
    ) -> PContext:
        for local_rank, env in envs.items():
            env.update(self._node.environment(local_rank, self._cycle))
        context = WorkerContext(
            spawner=self._node.spawner,
            reactor=self._node.reactor,
            end=self._node.ending.end,
            on_exit=self._ended,
            envs=envs,
            **torch_arguments,
        )
        self._pcontext = context  # before the start: if that fails midway, those that run are ended
        self._node.workers = context.workers
        record = self._current()
        record.workers = context.workers
        record.error_files = dict(context.error_files)
        try:
            context.start()
        except (OSError, subprocess.SubprocessError) as error:
            raise FaultToleranceError(f"the ranks can't be started: {error}") from error
        return context

    def _watch(self) -> Outcome:
        """Serve until the cycle is over, and say how."""
        self._worker_group.state = WorkerState.HEALTHY
        self._start_membership()
        interval = self._node.line.namespace.monitor_interval
        while (outcome := self._judge()) is None:
            self._node.reactor.run_once(interval)
        return outcome

    def _judge(self) -> Outcome | None:
        record, membership = self._current(), self._membership
        if self._node.signals.received or record.shutdown_request is not None:
            return Outcome.STOPPED
        if membership is not None and membership.error is not None:
            raise membership.error
        self._check_none_is_stuck()
        if record.hung_for_s() > _HUNG_AND_ALIVE_S:
            return Outcome.FAILED  # its monitor could not end it; what we can do is told below
        failed = sum(map(record.has_failed, record.exits))
        return self._node.policy.judge(
            GroupView(
                running=len(record.global_ranks) - len(record.exits),
                succeeded=len(record.exits) - failed,
                failed=failed,
                nodes_waiting=0 if membership is None else membership.nodes_waiting,
            )
        )

    def _end_cycle(self, outcome: Outcome) -> Outcome:
        """End the ranks as the outcome asks for; the outcome after that."""
        node, record = self._node, self._current()
        workers = list(record.workers.values())
        if outcome is Outcome.STOPPED:
            if node.signals.received:
                self._stop_as_asked(workers)
            else:
                self._let_requester_end(workers)
        elif outcome is Outcome.SUCCEEDED:
            node.ending.clear(workers, quietly=False)
        self._stop_workers(self._worker_group)
        node.control.accept_all()
        node.ranks_ended_well = record.all_ended_well()
        if outcome is Outcome.STOPPED and not node.signals.received and node.ranks_ended_well:
            return Outcome.SUCCEEDED  # the request to end came from a job that was at its end
        if outcome in (Outcome.FAILED, Outcome.MEMBERSHIP) and record.shutdown_request is not None:
            return Outcome.STOPPED  # a request that came in the last moment
        return outcome

    def _decide(self) -> Decision:
        decision, received = self._node.policy.decide(self._history), self._node.signals.received
        if decision.action is Action.RESTART and received:
            self._node.tell_asked_to_stop(ranks=0)
            return dataclasses.replace(decision, action=Action.GIVE_UP, reason="not restarting")
        return decision

    def _stop_as_asked(self, workers: list[Worker]) -> None:
        """Pass the request on and wait, as long as the user allows.

        A Python rank gets the signal itself and alone: its data-loader workers would die of it and take the
        last checkpoint with them. Some other command may be a wrapper that passes nothing on, so its whole
        group gets it.
        """
        node, line = self._node, self._node.line
        alive = [worker for worker in workers if not worker.look()]
        node.tell_asked_to_stop(ranks=len(alive))
        passed_on = 0

        def over() -> bool:
            nonlocal passed_on
            for number in node.signals.received[passed_on:]:
                passed_on += 1
                if node.signals.ask_to_kill():
                    node.say(lines.killing_at_once(number.name))
                    return True
                node.ending.ask(workers, number, whole_group=not line.ranks_are_python)
            return node.signals.ask_to_kill() or all(worker.exitcode is not None for worker in workers)

        deadline = time.monotonic() + line.term_timeout
        node.reactor.run_until(over, deadline_s=deadline)
        node.ending.kill(workers)
        if not line.ranks_are_python:
            # the wrapper itself may have died of it at once; what it started has the same time
            left_s = max(0.0, deadline - time.monotonic())
            node.ending.clear(workers, leftover_grace_s=left_s, ask=False)

    def _let_requester_end(self, workers: list[Worker]) -> None:
        """The rank that asked for the end has something to say on its way out: a traceback, a message."""
        request = self._current().shutdown_request
        assert request is not None
        asked = [worker for worker in workers if worker.pid == request.pid] or workers
        self._node.ending.wait(asked, self._node.line.stop_timeout)

    # -- what is heard meanwhile --------------------------------------------------------------------------

    def _ended(self, worker: Worker) -> None:
        # what the rank or its monitor said before it ended is to be known first
        self._node.control.accept_all()
        self._node.monitors.hear_all()
        self._current().ended(worker)

    def _heard_of(self, local_rank: int, message: dict[str, Any]) -> None:
        if self._record is not None:
            self._record.told_by_monitor(local_rank, message)

    def _asked(self, request: ReceivedRequest) -> None:
        node, record = self._node, self._record
        rank, action = request.rank, request.action
        node.log.write(
            "workload_control", action=action.value, description=request.description, rank=rank, pid=request.pid
        )
        if action is WorkloadAction.ShutdownWorkload and record is not None:
            record.shutdown_request = record.shutdown_request or request
        elif action is WorkloadAction.ExcludeThisNode:
            text = lines.request_received(
                action=action.value, description=request.description, rank=rank, pid=request.pid
            )
            node.say(f"{text}; this version can't leave a node out yet, the restart policy decides")

    def _check_none_is_stuck(self) -> None:
        """torch's TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT, off unless the user sets it."""
        timeout = getattr(self, "_uninterruptible_state_timeout", 0)
        if timeout > 0 and self._check_uninterruptible_state_timeout(self._worker_group, timeout) is not None:
            raise FaultToleranceError(f"a rank was stuck in the kernel for {timeout:g} s: this node gives up")

    def _check_all_are_gone(self) -> None:
        """A rank that can't be ended holds what a new one would need."""
        stuck = [worker.pid for worker in self._current().workers.values() if not worker.reaped]
        if stuck:
            raise FaultToleranceError(f"processes {stuck} can't be ended: this node doesn't restart")

    def _start_membership(self) -> None:
        if self._node.line.max_nodes > 1 and self._handler.get_backend() != "static":
            self._membership = MembershipWatch(self._handler, self._node.line.namespace.monitor_interval)
            self._node.reactor.watch(self._membership.fileno(), self._membership.drain)

    def _stop_membership(self) -> None:
        if self._membership is not None:
            self._node.reactor.unwatch(self._membership.fileno())
            self._membership.stop()
            # a question that is under way, to a host that is gone, may take a minute: the next round waits for it
            self._last_membership, self._membership = self._membership, None

    def _current(self) -> CycleRecord:
        assert self._record is not None
        return self._record

    def _cause(self, outcome: Outcome) -> Cause:
        waiting = 0 if self._last_membership is None else self._last_membership.nodes_waiting
        received = self._node.signals.received
        return announce.cause_of(
            outcome, self._current(), nodes_waiting=waiting, asked_by=received[0].name if received else None
        )

    def _succeeded(self, record: CycleRecord, decision: Decision) -> RunResult:
        announce.log_end(self._node, record, Outcome.SUCCEEDED, decision, None)
        self._worker_group.state = WorkerState.SUCCEEDED
        if (self._worker_group.group_world_size or 1) > 1:
            self._node.blocking(self._exit_barrier)
        self._node.say(lines.run_finished(len(self._history)))
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(record.global_ranks))

    def _log_lost(self, error: RendezvousError) -> None:
        """The other nodes can't be reached any more: that ends the job here; ``job`` says so."""
        cause = Cause(kind=CauseKind.MEMBERSHIP, text=lines.rendezvous_failed(error))
        decision = Decision(action=Action.GIVE_UP, restarts_left=self._remaining_restarts, reason="")
        announce.log_end(self._node, self._current(), Outcome.FAILED, decision, cause)
