"""torch's elastic agent around the control plane: starts the ranks of a cycle, reports how they do, and ends them.

When cycles begin and end, and why, the coordinator decides; this says how its node stands and does what follows.
"""

from __future__ import annotations

import signal
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import PContext, SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousError

from megatron_ft.core.control import WorkloadAction
from megatron_ft.core.diagnosis.exits import Cause, CauseKind
from megatron_ft.core.errors import FaultToleranceError
from megatron_ft.core.job.edge import Leave
from megatron_ft.core.job.messages import Goodbye, Phase, Regroup, Verdict
from megatron_ft.core.job.restart_policy import Action, Decision, NodeState, Outcome
from megatron_ft.core.job.roll import Held
from megatron_ft.core.messages.monitor import Report
from megatron_ft.launcher.base import lines
from megatron_ft.launcher.control import ReceivedRequest
from megatron_ft.launcher.coordination.coordination import Coordination
from megatron_ft.launcher.coordination.torch_rounds import TorchRounds
from megatron_ft.launcher.cycle import announce, health_gate, starting, stopping
from megatron_ft.launcher.cycle.conclusion import Known, asked_at_last, conclude, has_ended_the_job, left_out, report
from megatron_ft.launcher.cycle.cycle_record import CycleRecord
from megatron_ft.launcher.cycle.hang_diagnosis import Inquest
from megatron_ft.launcher.job_errors import CycleOverError, JobEndedError, JobLeftError, NodeExcludedError
from megatron_ft.launcher.node import Node
from megatron_ft.launcher.processes import crash_evidence
from megatron_ft.launcher.processes.worker import Worker
from megatron_ft.launcher.torch_compat import private_names

__all__ = ["FaultTolerantAgent"]

_GOODBYE_S = 1.0
"""The others are told why this node leaves, if they can be in this time."""


class FaultTolerantAgent(LocalElasticAgent):
    """One node's agent. Its rank numbering, environment and log files are torch's.

    ``meets_by_torch``: the nodes meet by a rendezvous of torch's own, and this launcher coordinates only itself.
    """

    def __init__(self, *, node: Node, coordination: Coordination, meets_by_torch: bool, **torch_arguments: Any) -> None:
        super().__init__(**torch_arguments)
        self._node = node
        self._coordination = coordination
        self._rounds = TorchRounds(self._worker_group.spec.rdzv_handler) if meets_by_torch else None
        self._grace_s = node.line.stop_timeout
        self._cycles = 0
        self._ran: Held | None = None
        """The cycle that this node's ranks ran last."""
        self._record: CycleRecord | None = None
        self._inquest: Inquest | None = None
        node.monitors.on_message = self._heard_of
        node.control.on_request = self._asked
        coordination.on_collect = self._look_at_ranks

    def _invoke_run(self, role: str = "default") -> RunResult:
        try:
            while True:
                self._join()
                result = self._run_cycle()
                if result is not None:
                    return result
        except SignalException:
            name = self._node.signals.received[0].name
            self._say_goodbye(Goodbye(f"its launcher received {name}", well=self._node.ranks_ended_well))
            raise
        except (JobEndedError, JobLeftError, NodeExcludedError):
            raise
        except BaseException as error:
            # whatever it is: the others are to know at once, and why
            self._say_goodbye(Goodbye(f"its launcher failed: {lines.in_one_line(error)}", failed=True))
            raise

    def _join(self) -> None:
        """Wait until a cycle begins in which this node has a place."""
        node, coordination = self._node, self._coordination
        node.ranks_ended_well = False
        self._store = self._worker_group.store = None
        self._check_wanted()
        if node.health is not None:
            ranks = self._worker_group.spec.local_world_size
            health_gate.wait_until_fit(node, node.health, coordination, ranks=ranks, check=self._check_wanted)
        if coordination.begun is self._ran:
            coordination.ready()
        while coordination.begun is self._ran:
            self._check_wanted()
            node.reactor.run_once(None)
        self._ran = coordination.begun

    def _check_wanted(self) -> None:
        """Between cycles: whether there is to be another one."""
        self._node.raise_if_asked_to_stop()
        left = self._coordination.left
        if left is None:
            return
        if left.code == 1 and left.text:
            self._node.say(lines.shut_down_between(left.text))
            raise JobEndedError(left.text)
        stood_aside = self._coordination.member.standing.phase is Phase.ASIDE
        raise JobLeftError(left.code, left.text or ("it stood aside" if stood_aside else ""))

    def _run_cycle(self) -> RunResult | None:
        """From the ranks' start to their end, and what follows; None: another cycle."""
        node = self._node
        self._record = self._new_record([])  # its ranks are numbered when the nodes have met
        self._inquest = self._new_inquest(self._record)
        try:
            self._initialize_workers(self._worker_group)
            announce.cycle_started(node, self._current(), self._worker_group, self._remaining_restarts)
        except CycleOverError:
            pass
        except RendezvousError as error:
            if self._rounds is not None:
                raise
            text = lines.rendezvous_failed(error)
            self._report(NodeState.UNHEALTHY, Cause(kind=CauseKind.MEMBERSHIP, text=text, follows=True))
        asked = self._watch()
        outcome = self._end_ranks(asked)
        self._cycles += 1
        stuck = "" if outcome is Outcome.SUCCEEDED else announce.stuck(node, self._current())
        verdict = self._hear_verdict(outcome)
        if outcome is Outcome.SUCCEEDED:
            return self._succeeded(verdict)
        outcome = asked_at_last(self._current(), outcome)
        if outcome is Outcome.EXCLUDED:
            self._leave_the_others(outcome, self._current().request_cause(), "")
        if node.signals.received:
            node.tell_asked_to_stop(ranks=0)
        decision, cause = conclude(self._known(verdict), outcome)
        if stuck and decision.action is Action.RESTART:  # what they hold (devices, memory, ports) new ranks would need
            self._leave_the_others(outcome, cause, stuck)
        is_here = verdict is not None and verdict.node == self._coordination.member.place
        if is_here and self._current().found is None:  # else it is logged already
            announce.finding(node, self._current(), cause)
        announce.cycle_ended(node, self._current(), outcome, decision, cause)
        self._worker_group.state = WorkerState.FAILED
        node.raise_if_asked_to_stop()
        if decision.action is Action.GIVE_UP:
            return self._gave_up(verdict, cause)
        node.device_memory.begin(node.ending.take_let_go())
        return None

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        begun = self._coordination.begun
        assert begun is not None
        self._remaining_restarts = max(0, self._node.line.namespace.max_restarts - begun.decision.restarts)
        meet = super()._rendezvous if self._rounds is None else self._rounds.in_turn(super()._rendezvous)
        starting.meet(meet, worker_group, node=self._node, check=self._check_cycle_goes_on)
        self._store = worker_group.store
        self._record = self._new_record([worker.global_rank for worker in worker_group.workers])
        self._inquest = self._new_inquest(self._record)

    def _check_cycle_goes_on(self) -> None:
        self._node.raise_if_asked_to_stop()
        if self._coordination.end is not None or self._coordination.left is not None:
            raise CycleOverError

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with private_names.workers_started_by(self._start_processes):
            return dict(super()._start_workers(worker_group))

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float | None = None) -> None:
        """Also for what nobody foresaw: whatever ends ``run``, no rank outlives it."""
        private_names.shut_down_agent(super()._shutdown, death_sig, self._grace_s)

    def _new_record(self, global_ranks: list[int]) -> CycleRecord:
        cycle = self._coordination.cycle if self._rounds is None else self._rounds.cycle if global_ranks else -1
        return CycleRecord(
            cycle,
            global_ranks,
            snapshot=lambda local_rank: self._node.monitors.snapshot(local_rank, cycle),
            log=self._node.log,
            checkpointed=self._node.checkpointed,
            last_words=lambda local_rank: crash_evidence.read_last_words(self._node, self._current(), local_rank),
        )

    def _new_inquest(self, record: CycleRecord) -> Inquest:
        decides = self._node.is_min_healthy or self._rounds is not None
        return Inquest(self._node, record, None if decides else self._coordination, are_all=self._rounds is None)

    def _start_processes(self, *, envs: dict[int, dict[str, str]], **given: Any) -> PContext:
        node, record = self._node, self._current()
        node.device_memory.wait(self._check_cycle_goes_on)
        node.ranks_start(envs, cycle=record.cycle, restarts_left=self._remaining_restarts)
        context = starting.make_context(node, record, self._ended, envs=envs, **given)
        self._pcontext = context  # before the start: if that fails midway, those that run are ended
        starting.start(node, record, context)
        return context

    def _watch(self) -> Outcome | None:
        """Serve, and report, until the cycle is over; how, where somebody asked for that on this node."""
        node, coordination, record = self._node, self._coordination, self._current()
        self._worker_group.state = WorkerState.HEALTHY
        while not node.signals.received and record.exclude_request is None:
            self._check_none_is_stuck()
            self._report_state()
            if coordination.end is not None or coordination.left is not None:
                return None
            node.reactor.run_once(node.line.namespace.monitor_interval)
            if self._rounds is not None and (waiting := self._rounds.nodes_waiting(node)):
                coordination.tell(Regroup(coordination.cycle, lines.nodes_waiting(waiting)))
        return Outcome.STOPPED if node.signals.received else Outcome.EXCLUDED

    def _report_state(self) -> None:
        record = self._current()
        assert self._inquest is not None
        if not record.global_ranks or self._inquest.is_deciding:
            return
        # if its monitor could not end a rank that it found hung, what we can do is said later
        if any(map(record.has_failed, record.exits)) or record.has_outlived_its_end():
            self._report(NodeState.UNHEALTHY)
        elif len(record.exits) == len(record.global_ranks):
            self._report(NodeState.SUCCEEDED)

    def _report(self, state: NodeState, cause: Cause | None = None) -> None:
        record, cycle = self._current(), self._coordination.cycle
        self._coordination.report(state, lambda: report(record, cycle, state, cause))

    def _tell_own_failure(self) -> None:
        """The cycle has failed, maybe because others have lost a rank of this node that is slow to end: say why."""
        cause = None if self._node.is_min_healthy else self._current().own_failure()
        if cause is not None:
            self._report(NodeState.UNHEALTHY, cause)

    def _end_ranks(self, asked: Outcome | None) -> Outcome:
        """End the ranks as was ``asked`` for here, else as the end of the cycle asks for; how it has ended."""
        node, record, end = self._node, self._current(), self._coordination.end
        workers = list(record.workers.values())
        outcome = asked or (Outcome.STOPPED if end is None else end.outcome)
        if asked is Outcome.EXCLUDED:
            self._report(NodeState.EXCLUDED, record.request_cause())
        if self._inquest is not None:
            self._inquest.close()
        if outcome is Outcome.FAILED:
            self._tell_own_failure()
            stopping.let_monitors_end(node, record)
        if asked is Outcome.STOPPED:
            stopping.stop_as_asked(node, workers)
        elif outcome in (Outcome.STOPPED, Outcome.EXCLUDED):
            stopping.let_requester_end(node, record, workers)
        elif outcome is Outcome.SUCCEEDED:
            # those left of a node where others failed: they are about to finish, like all the other nodes' ranks
            node.ending.wait(workers, node.line.stop_timeout)
            node.ending.clear(workers, quietly=False)
        is_restart = outcome is Outcome.FAILED and end is not None and end.restarts
        self._grace_s = node.line.restart_grace if is_restart else node.line.stop_timeout
        self._stop_workers(self._worker_group)
        node.control.accept_all()
        if outcome is Outcome.FAILED:
            self._tell_own_failure()
        node.ranks_ended_well = record.all_ended_well()
        is_alone = self._worker_group.group_world_size == 1
        if outcome is Outcome.STOPPED and not node.signals.received and node.ranks_ended_well and is_alone:
            return Outcome.SUCCEEDED  # the request to end came from a job that was at its end
        return outcome

    def _hear_verdict(self, outcome: Outcome) -> Verdict | None:
        """Why the cycle has ended; None where nobody says it: this node leaves, or the others have lost it."""
        node, coordination = self._node, self._coordination
        if outcome is Outcome.EXCLUDED or (outcome is Outcome.STOPPED and node.signals.received):
            return None

        def is_known() -> bool:
            end = coordination.end  # another one may come: the others have lost this node meanwhile
            is_lost = end is None or end.lost
            return is_lost or bool(coordination.verdict or coordination.left or node.signals.received)

        node.reactor.run_until(is_known)
        return coordination.verdict

    # -- what follows -------------------------------------------------------------------------------------

    def _known(self, verdict: Verdict | None) -> Known:
        coordination = self._coordination
        return Known(
            record=self._current(),
            verdict=verdict,
            told=coordination.told,
            place=coordination.member.place,
            left=coordination.left,
            lost="" if coordination.end is None or not coordination.end.lost else coordination.end.text,
            cut_off=coordination.is_cut_off,
            received=self._node.signals.received,
            restarts_left=self._remaining_restarts,
        )

    def _gave_up(self, verdict: Verdict | None, cause: Cause) -> RunResult | None:
        """The job has failed for good: torch's table is for the node whose ranks did it. None: it goes on after all."""
        record, left = self._current(), self._see_it_end()
        if left is None:
            return None
        if verdict is None:
            raise JobLeftError(left.code, "" if left.text == cause.text else left.text)
        if left.code:
            self._node.failure_code = left.code
        failures = record.torch_failures(cause)
        if not (failures and has_ended_the_job(self._known(verdict), is_min_healthy=self._node.is_min_healthy)):
            raise JobEndedError(cause.text)
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _succeeded(self, verdict: Verdict | None) -> RunResult | None:
        record = self._current()
        finish = Decision(action=Action.FINISH, restarts_left=self._remaining_restarts, reason="")
        announce.log_end(self._node, record, Outcome.SUCCEEDED, finish, None)
        self._worker_group.state = WorkerState.SUCCEEDED
        if self._rounds is not None:
            self._rounds.wait_for_the_others(self._node, self._exit_barrier)
        if self._see_it_end() is None:
            return None
        text = "" if verdict is None else verdict.text
        self._node.say(text or lines.run_finished(self._cycles))
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(record.global_ranks))

    def _see_it_end(self) -> Leave | None:
        """None of this node's ranks is left: stay until every node knows how the job has ended.

        None: another coordinator, which hadn't heard of that end, has begun another cycle.
        """
        node, coordination = self._node, self._coordination
        if coordination.left is None:
            coordination.ready()
        node.reactor.run_until(
            lambda: coordination.left is not None or coordination.begun is not self._ran or bool(node.signals.received)
        )
        node.raise_if_asked_to_stop()
        return coordination.left

    def _leave_the_others(self, outcome: Outcome, cause: Cause, stuck: str) -> NoReturn:
        """A rank asked for this node to be left out, or can't be ended: the others go on, if they are enough."""
        node, line = self._node, self._node.line
        self._say_goodbye(Goodbye(f"{stuck} can't be ended" if stuck else cause.text, excluded=True))
        known, is_alone = self._known(None), line.max_nodes == 1
        job_ends = known.left is not None and known.left.code != 0
        if self._rounds is not None:  # whose other nodes this launcher doesn't know
            job_ends = line.min_nodes == line.max_nodes
        decision = left_out(known, stuck, is_alone=is_alone, job_ends=job_ends)
        announce.cycle_ended(node, self._current(), outcome, decision, cause)
        if stuck and is_alone:
            raise JobEndedError(cause.text)
        if stuck and known.left is not None and known.left.text:
            node.say(known.left.text)
        raise NodeExcludedError(job_ends=job_ends)

    def _say_goodbye(self, goodbye: Goodbye) -> None:
        self._coordination.goodbye(goodbye, within_s=_GOODBYE_S)

    # -- what is heard meanwhile --------------------------------------------------------------------------

    def _ended(self, worker: Worker) -> None:
        # what the rank or its monitor said before it ended is to be known first
        self._node.control.accept_all()
        self._node.monitors.hear_all()
        self._current().ended(worker)
        announce.training_again(self._node, self._current())
        crash_evidence.tell(self._node, self._current(), worker.local_rank)

    def _heard_of(self, local_rank: int, report: Report) -> None:
        if self._record is not None:
            self._record.told_by_monitor(local_rank, report)
            if self._inquest is not None:
                self._inquest.heard(local_rank, report)
            announce.training_again(self._node, self._record)

    def _look_at_ranks(self) -> None:
        if self._inquest is not None:
            self._inquest.look()

    def _asked(self, request: ReceivedRequest) -> None:
        node, record = self._node, self._record
        action = request.action
        announce.log_request(node, request)
        if action is WorkloadAction.Continue or record is None:
            node.say(request.text)
        elif action is WorkloadAction.ShutdownWorkload:
            record.shutdown_request = record.shutdown_request or request
            self._coordination.shutdown(request.text, request.rank)
        else:
            record.exclude_request = record.exclude_request or request

    def _check_none_is_stuck(self) -> None:
        """torch's TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT, off unless the user sets it."""
        timeout = getattr(self, "_uninterruptible_state_timeout", 0)
        if timeout > 0 and self._check_uninterruptible_state_timeout(self._worker_group, timeout) is not None:
            raise FaultToleranceError(f"a rank was stuck in the kernel for {timeout:g} s: this node gives up")

    def _current(self) -> CycleRecord:
        assert self._record is not None
        return self._record
