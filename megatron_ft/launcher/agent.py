"""torch's elastic agent with our eyes and hands: knows ends at once, ends whole groups, says what happened."""

from __future__ import annotations

import signal
import subprocess
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
)

from megatron_ft.core.control import WorkloadAction
from megatron_ft.core.errors import FaultToleranceError
from megatron_ft.core.exit_description import Cause, CauseKind
from megatron_ft.core.membership import Admission
from megatron_ft.core.restart_policy import Action, Decision, GroupView, NodeState, Outcome
from megatron_ft.launcher import announce, crash_evidence, departure, lines, node_lines, stopping, torch_private
from megatron_ft.launcher.accounts import Accounts
from megatron_ft.launcher.control import ReceivedRequest
from megatron_ft.launcher.cycle_record import CycleRecord
from megatron_ft.launcher.doorbell import Doorbell
from megatron_ft.launcher.fitness import Fitness
from megatron_ft.launcher.inquest import Inquest
from megatron_ft.launcher.job_errors import JobEndedError, NodeExcludedError, NodeNotNeededError
from megatron_ft.launcher.meeting import Meetings
from megatron_ft.launcher.node import Node
from megatron_ft.launcher.peers import CutOffError, Peers
from megatron_ft.launcher.rank_logs import CycleLogs
from megatron_ft.launcher.rounds import Newcomers, note_heard, of_the_run
from megatron_ft.launcher.workers import Worker, WorkerContext

_HUNG_AND_ALIVE_S = 20.0
"""After a verdict the monitor signals, and kills after a grace of 5 s; then its rank should be gone."""

__all__ = ["FaultTolerantAgent"]


class FaultTolerantAgent(LocalElasticAgent):
    """One node's agent. Its rendezvous, rank numbering, environment and log files are torch's."""

    def __init__(self, *, node: Node, **torch_arguments: Any) -> None:
        super().__init__(**torch_arguments)
        self._node = node
        self._handler: Any = self._worker_group.spec.rdzv_handler
        self._cycle = 0
        self._grace_s = node.line.stop_timeout
        self._meetings = Meetings(node, self._handler)
        health, ranks = node.health, self._worker_group.spec.local_world_size
        self._fitness = None if health is None else Fitness(node, self._handler, health, ranks=ranks)
        self._bell: Doorbell | None = None
        self._peers: Peers | None = None
        self._ends_together = False
        self._record: CycleRecord | None = None
        self._inquest: Inquest | None = None
        policy, at_once = node.policy, node.line.options.scale_up_at_once
        admission = Admission(at_once=at_once, goes_on_without=policy.is_common)
        self._newcomers = Newcomers(node.reactor, admission, lambda nodes: announce.standing_by(node, nodes))
        self._accounts = Accounts(node, lambda: node.blocking(self._handler.num_nodes_waiting))
        node.monitors.on_message = self._heard_of
        node.control.on_request = self._asked

    # -- torch's loop -------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = "default") -> RunResult:
        try:
            return self._run_cycles()
        except CutOffError:
            self._handler.shutdown = lambda: True  # would wait for an answer, too
            raise
        except NodeNotNeededError:
            departure.briefly(self._node, lambda: note_heard(self._handler))
            raise
        finally:
            if self._peers is not None:
                if self._ends_together and not self._node.signals.received:
                    # while its host is sure to be there
                    self._handler.shutdown()
                    self._handler.shutdown = lambda: True
                self._peers.leave(together=self._ends_together)
            if not self._node.signals.received:
                departure.close_for_standby(self._node, self._handler)

    def _run_cycles(self) -> RunResult:
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
            decision = self._accounts.close(record, outcome, self._peers)
            if outcome is Outcome.SUCCEEDED:
                return self._succeeded(record, decision)
            cause = self._cause(outcome)
            announce.cycle_ended(self._node, record, outcome, decision, cause)
            self._worker_group.state = WorkerState.FAILED
            self._node.raise_if_asked_to_stop()
            if outcome is Outcome.STOPPED:
                self._ends_together = True
                raise JobEndedError(cause.text)
            if outcome is Outcome.EXCLUDED:
                self._exclude_this_node()
            if decision.leaves and self._peers is not None:
                self._ends_together = departure.leave_stuck(
                    self._node, self._handler, self._peers, why=f"{self._accounts.last().stuck} can't be ended"
                )
                raise NodeExcludedError(job_ends=self._ends_together)
            if decision.action is Action.GIVE_UP:
                if decision.no_progress:
                    self._node.failure_code = self._node.line.options.no_restart_exit_code
                self._ends_together = self._peers is not None and self._peers.view.outcome is not None
                if self._peers is not None and self._peers.blames_others():
                    raise JobEndedError(cause.text)
                return RunResult(state=WorkerState.FAILED, failures=record.torch_failures(cause))
            self._remaining_restarts = decision.restarts_left
            self._node.device_memory.begin(self._node.ending.take_let_go())

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        node, peers = self._node, self._peers
        node.ranks_ended_well = False
        self._store = worker_group.store = None  # a store that nobody holds gives its port back
        self._meetings.cycle_is_over(peers)
        if self._fitness is not None:
            self._fitness.wait_for(
                own_count=self._meetings.count, check=self._check_wanted, stand_aside=self._stand_aside
            )
            peers = self._peers
        try:
            met = self._meetings.meet(self._torch_rendezvous, worker_group, peers=peers, check=self._check_wanted)
        except RendezvousGracefulExitError as error:
            raise NodeNotNeededError(str(error)) from error
        except RendezvousClosedError:
            if peers is not None:
                self._check_wanted(wait_s=1.0)
            if self._meetings.stands_by():
                raise NodeNotNeededError("others ran it to its end") from None
            raise
        self._cycle = met.cycle
        if peers is not None:
            peers.stop()
            self._peers = None
        if node.line.max_nodes > 1:
            run_id, used = self._handler.get_run_id(), met.restarts_used
            self._bell = self._bell or Doorbell(of_the_run(worker_group.store), run_id=run_id)
            self._peers = Peers(
                node,
                worker_group,
                cycle=met.cycle,
                run_id=run_id,
                restarts_before=used,
                advance_before=met.advance,
                reached=lambda: self._current().reached(),
                bell=self._bell,
            )
            self._remaining_restarts = max(0, node.line.namespace.max_restarts - used)

    def _torch_rendezvous(self, worker_group: WorkerGroup) -> None:
        self._newcomers.join()
        super()._rendezvous(worker_group)

    def _stand_aside(self) -> None:
        """Let the others meet without this node."""
        self._meetings.forget()
        if self._peers is not None:
            self._peers.leave(together=False)
            self._peers = None

    def _check_wanted(self, wait_s: float = 0.0) -> None:
        """While the nodes meet: whether there is to be another cycle."""
        self._node.raise_if_asked_to_stop()
        text = None if self._peers is None else self._peers.shutdown_text(wait_s=wait_s)
        if self._peers is not None and text is None and not wait_s:
            self._peers.check()
        if text is not None:
            self._node.say(lines.shut_down_between(text))
            self._ends_together = True
            raise JobEndedError(text)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._record = CycleRecord(
            self._cycle,
            [worker.global_rank for worker in worker_group.workers],
            snapshot=lambda local_rank: self._node.monitors.snapshot(local_rank, self._cycle),
            log=self._node.log,
            last_words=lambda local_rank: crash_evidence.read_last_words(self._node, self._current(), local_rank),
        )
        self._inquest = Inquest(self._node, self._record, self._peers)
        with torch_private.workers_started_by(self._start_processes):
            pids: dict[int, Any] = super()._start_workers(worker_group)
        return pids

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float | None = None) -> None:
        """Also for what nobody foresaw: whatever ends ``run``, no rank outlives it."""
        torch_private.shut_down_agent(super()._shutdown, death_sig, self._grace_s)
        self._newcomers.end()

    # -- one cycle ----------------------------------------------------------------------------------------

    def _start_processes(
        self, *, envs: dict[int, dict[str, str]], logs_specs: Any, start_method: str = "", **torch_arguments: Any
    ) -> PContext:
        self._node.device_memory.wait(self._node.raise_if_asked_to_stop)
        self._node.ranks_start(envs, cycle=self._cycle, restarts_left=self._remaining_restarts)
        context = WorkerContext(
            spawner=self._node.spawner,
            reactor=self._node.reactor,
            end=self._node.ending.end,
            on_start=lambda worker: self._node.monitors.rank_started(worker.local_rank, worker.pid),
            on_exit=self._ended,
            envs=envs,
            logs_specs=CycleLogs(logs_specs, run_dir=self._node.run_dir, say=self._node.say),
            **torch_arguments,
        )
        self._pcontext = context  # before the start: if that fails midway, those that run are ended
        self._node.workers = context.workers
        record = self._current()
        record.workers = context.workers
        record.error_files, record.stderrs = dict(context.error_files), dict(context.stderrs)
        try:
            context.start()
            self._node.ranks_started(record)
        except (OSError, subprocess.SubprocessError) as error:
            raise FaultToleranceError(f"the ranks can't be started: {error}") from error
        return context

    def _watch(self) -> Outcome:
        """Serve until the cycle is over, and say how."""
        self._worker_group.state = WorkerState.HEALTHY
        several = self._node.line.max_nodes > 1 and self._handler.get_backend() != "static"
        interval = self._node.line.namespace.monitor_interval
        if several:
            self._newcomers.begin(self._handler, interval, self._meetings.nodes)
        while (outcome := self._judge()) is None or (outcome is Outcome.FAILED and self._cause_may_come()):
            self._node.reactor.run_once(interval)
        return outcome

    def _judge(self) -> Outcome | None:
        record, peers = self._current(), self._peers
        if self._node.signals.received or record.shutdown_request is not None:
            return Outcome.STOPPED
        if record.exclude_request is not None:
            return Outcome.EXCLUDED
        nodes_waiting = self._newcomers.waiting()
        if peers is not None:
            peers.check()
            if peers.view.outcome is not None:
                return peers.view.outcome
            if peers.view.nodes[peers.number].state is NodeState.LOST:
                return Outcome.MEMBERSHIP
        self._check_none_is_stuck()
        if self._cause_may_come():
            return None
        failed = sum(map(record.has_failed, record.exits))
        if record.hung_for_s() > _HUNG_AND_ALIVE_S:
            failed += 1  # its monitor could not end it; what we can do is told below
        view = GroupView(
            running=len(record.global_ranks) - len(record.exits),
            succeeded=len(record.exits) - failed,
            failed=failed,
            nodes_waiting=nodes_waiting,
        )
        if peers is not None and self._node.policy.is_common:
            peers.tell(view.state, lambda: record.cause() if failed else "")
            if nodes_waiting:
                return peers.end_for_all(Outcome.MEMBERSHIP, cause=record.cause, nodes_waiting=nodes_waiting)
            return None  # until all know it, in the order in which they hear of it
        outcome = self._node.policy.judge(view)
        if peers is not None and outcome in (Outcome.FAILED, Outcome.MEMBERSHIP):
            return peers.end_for_all(outcome, cause=record.cause, nodes_waiting=view.nodes_waiting)
        return outcome

    def _end_cycle(self, outcome: Outcome) -> Outcome:
        """End the ranks as the outcome asks for; the outcome after that."""
        node, record = self._node, self._current()
        workers = list(record.workers.values())
        if self._inquest is not None:
            self._inquest.close()
        if outcome is Outcome.STOPPED and node.signals.received:
            stopping.stop_as_asked(node, workers)
        elif outcome in (Outcome.STOPPED, Outcome.EXCLUDED):
            stopping.let_requester_end(node, record, workers)
        elif outcome is Outcome.SUCCEEDED:
            # those left of a node where others failed: they are about to finish, like all the other nodes' ranks
            node.ending.wait(workers, node.line.stop_timeout)
            node.ending.clear(workers, quietly=False)
        is_restart = outcome is Outcome.FAILED and self._remaining_restarts > 0
        self._grace_s = node.line.restart_grace if is_restart else node.line.stop_timeout
        self._stop_workers(self._worker_group)
        node.control.accept_all()
        node.ranks_ended_well = record.all_ended_well()
        if outcome is Outcome.STOPPED and not node.signals.received and node.ranks_ended_well and self._peers is None:
            return Outcome.SUCCEEDED  # the request to end came from a job that was at its end
        if outcome in (Outcome.FAILED, Outcome.MEMBERSHIP):  # requests that came in the last moment
            if record.shutdown_request is not None or (self._peers is not None and self._peers.view.shutdown):
                return Outcome.STOPPED
            if record.exclude_request is not None:
                return Outcome.EXCLUDED
        return outcome

    def _exclude_this_node(self) -> NoReturn:
        """Leave the others to themselves."""
        end = self._accounts.last()
        job_ends = end.nodes_left is not None and end.nodes_left < self._node.policy.min_nodes
        if job_ends:
            self._ends_together = True
        else:
            departure.leave(self._node, self._handler)
        raise NodeExcludedError(job_ends=job_ends)

    # -- what is heard meanwhile --------------------------------------------------------------------------

    def _ended(self, worker: Worker) -> None:
        # what the rank or its monitor said before it ended is to be known first
        self._node.control.accept_all()
        self._node.monitors.hear_all()
        self._current().ended(worker)
        announce.training_again(self._node, self._current())
        crash_evidence.tell(self._node, self._current(), worker.local_rank)

    def _heard_of(self, local_rank: int, message: dict[str, Any]) -> None:
        if self._record is not None:
            self._record.told_by_monitor(local_rank, message)
            if self._inquest is not None:
                self._inquest.heard(local_rank, message)
            announce.training_again(self._node, self._record)

    def _asked(self, request: ReceivedRequest) -> None:
        node, record, peers = self._node, self._record, self._peers
        action = request.action
        announce.log_request(node, request)
        if action is WorkloadAction.Continue or record is None:
            node.say(request.text)
        elif action is WorkloadAction.ShutdownWorkload:
            record.shutdown_request = record.shutdown_request or request
            if peers is not None:
                peers.ask_for_shutdown(request.text)
        else:
            record.exclude_request = record.exclude_request or request
            if peers is not None:
                peers.tell(NodeState.EXCLUDED, lambda: request.text)

    def _cause_may_come(self) -> bool:
        """A rank hangs, and all ranks are being looked at."""
        return self._inquest is not None and self._inquest.is_open()

    def _check_none_is_stuck(self) -> None:
        """torch's TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT, off unless the user sets it."""
        timeout = getattr(self, "_uninterruptible_state_timeout", 0)
        if timeout > 0 and self._check_uninterruptible_state_timeout(self._worker_group, timeout) is not None:
            raise FaultToleranceError(f"a rank was stuck in the kernel for {timeout:g} s: this node gives up")

    def _current(self) -> CycleRecord:
        assert self._record is not None
        return self._record

    def _cause(self, outcome: Outcome) -> Cause:
        received = self._node.signals.received
        return announce.cause_of(
            outcome,
            self._current(),
            nodes_waiting=self._newcomers.waiting_at_end(),
            asked_by=received[0].name if received else None,
            peers=self._peers,
            min_nodes=self._node.policy.min_nodes,
            is_common=self._node.policy.is_common,
        )

    def _succeeded(self, record: CycleRecord, decision: Decision) -> RunResult:
        announce.log_end(self._node, record, Outcome.SUCCEEDED, decision, None)
        self._worker_group.state = WorkerState.SUCCEEDED
        without = None
        if self._peers is not None and self._node.policy.is_common:
            self._ends_together = True
            without = node_lines.succeeded_without(self._peers.view)
        elif (self._worker_group.group_world_size or 1) > 1:
            try:
                self._node.reactor.call_blocking(self._exit_barrier, self._check_wanted)
            except CutOffError:
                self._handler.shutdown = lambda: True  # as torch has it: what is done is done
        self._node.say(without or lines.run_finished(self._accounts.cycles))
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(record.global_ranks))

    def _log_lost(self, error: RendezvousError) -> None:
        """The other nodes can't be reached any more: that ends the job here; ``job`` says so."""
        cause = Cause(kind=CauseKind.MEMBERSHIP, text=lines.rendezvous_failed(error))
        decision = Decision(action=Action.GIVE_UP, restarts_left=self._remaining_restarts, reason="")
        announce.log_end(self._node, self._current(), Outcome.FAILED, decision, cause)
