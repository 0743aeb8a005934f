"""One job on this node, from the first rendezvous to the exit code."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from msgspec import structs
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megatron_ft.config.files.options import as_record, summary
from megatron_ft.errors import ConfigError, FaultToleranceError
from megatron_ft.job.coordination import Coordination
from megatron_ft.job.rules.actions import OfMember
from megatron_ft.job.rules.decisions import Assignment
from megatron_ft.job.rules.faults import advice
from megatron_ft.job.rules.lives import Ending
from megatron_ft.job.rules.messages import Stay, Verdict
from megatron_ft.launcher import arguments
from megatron_ft.launcher.base import directories, launcher_lines
from megatron_ft.launcher.base.command_line import CommandLine
from megatron_ft.launcher.coordination import joining
from megatron_ft.launcher.coordination.meeting_place import MeetingPlace, meeting_place
from megatron_ft.launcher.cycle.fault_tolerant_agent import FaultTolerantAgent, JobOverError
from megatron_ft.launcher.cycle.node import LauncherNode, checkpointed
from megatron_ft.launcher.outcome import LauncherEnd, ResultFile, end_of, read_lives, utc
from megatron_ft.launcher.rules import cycle_lines
from megatron_ft.launcher.rules.conclusion import stopped
from megatron_ft.launcher.schedulers import kubernetes
from megatron_ft.launcher.schedulers.schedulers import SCHEDULERS
from megatron_ft.launcher.torch_compat import private_names
from megatron_ft.link.base.wording import printable
from megatron_ft.link.facts import launcher as records
from megatron_ft.link.linux import process_setup
from megatron_ft.link.linux.processes import process_began_ns
from megatron_ft.link.log import DEBUG, ERROR, LAUNCHER
from megatron_ft.records.event_log import EventLog, NullEventLog
from megatron_ft.run_ahead.forking_spawner import ServerProcess

_Say = Callable[[str], None]

_POD_BACK_S = 600.0
"""Seconds a pod may take to return: Kubernetes waits for up to 6 minutes before it starts a pod again."""
TOLD_BY = "FT_BAD_NODES_TOLD_BY"
"""Variable of a program that starts the launchers and reports bad nodes itself (megatron-ft slurm)."""


def launch(line: CommandLine, server: ServerProcess | None, clean_up: Callable[[str], int]) -> LauncherEnd:
    """Open the logs, run the job, and return how it has ended.

    ``clean_up`` takes the reason of an unforeseen failure, and returns the exit code.

    Raises:
        ConfigError: a user error; no rank was started.
        OSError: the launcher can't get what it needs before the job begins.
    """
    missing = private_names.missing_essentials()
    if missing:
        raise ConfigError(f"ft_launcher doesn't work with this torch, which has no {', '.join(missing)}")
    log_dir: str | None = None
    log: EventLog = NullEventLog()
    try:
        log_dir = directories.make_log_directory(
            ft_log_dir=line.options.log_dir,
            torch_log_dir=line.namespace.log_dir,
            run_id=line.run_id,
            job_name=line.where.log_name,
        )
    except OSError as error:
        line.options.warnings.append(f"no logs are written: {error}")
    try:
        place = meeting_place(line, os.environ)
        config, command = arguments.torch_launch_config(line, log_dir=log_dir)
    except ConfigError:
        if line.options.log_dir is None and log_dir is not None:
            directories.remove_if_empty(log_dir)
        raise
    if log_dir is not None:
        log = EventLog.open(log_dir, role="launcher", run_id=line.run_id, began_ns=process_began_ns())
    with contextlib.closing(log):
        try:
            return run(line, config, command, place=place, log=log, log_dir=log_dir, server=server)
        except (ConfigError, OSError):
            raise  # reported by the caller
        except Exception as error:  # noqa: BLE001 - whatever it is: one line, and an exit in order
            text = report_unforeseen(error, log, launcher_lines.make_printer(has_others=line.max_nodes > 1))
            code = clean_up(f"failed: {text}")
            log.write(records.RunEnded(exit_code=code))
            return LauncherEnd(code, error=error)


def run(
    line: CommandLine,
    config: LaunchConfig,
    command: Sequence[str],
    *,
    place: MeetingPlace,
    log: EventLog,
    log_dir: str | None,
    server: ServerProcess | None = None,
) -> LauncherEnd:
    """Run the job and tidy up; return how it has ended. ``server`` forks ranks, if there is one already.

    A ``log_dir`` of None: no logs, as one of the line's warnings says.
    """
    say = launcher_lines.make_printer(has_others=line.max_nodes > 1)
    announce = say_start(line, place, log_dir, say)
    log.write(as_record(line.options, command))
    lives = read_lives(log_dir)
    before, bad = lives.advance(command), lives.bad_nodes().get(place.me.name, "")
    place = replace(place, me=structs.replace(place.me, before=before, bad=bad))
    process_setup.raise_file_limit()
    try:
        node = LauncherNode(
            line, ranks=config.nproc_per_node, log=log, log_dir=log_dir, say=say, announce=announce, server=server
        )
        log.write(records.Meeting(how="alone" if place.is_alone else "coordinated", rank=place.me.rank))
        try:
            result = ResultFile(
                log,
                log_dir,
                job=place.me.job,
                command=command,
                is_first=place.is_alone or place.me.is_here,
                before=before,
            )
            end = _JobLife(node, place, config, command, result).run()
        finally:
            node.close()
    finally:
        process_setup.restore_file_limit()
    log.write(records.RunEnded(exit_code=end.code))
    if not place.is_alone:
        port = int(place.me.endpoint.rpartition(":")[2])
        for scheduler in SCHEDULERS.values():  # each goes by the environment: --scheduler none only gives no options
            scheduler.requeue(os.environ, result.place, result.ending, port, say, log.flush)
    return end


def say_start(line: CommandLine, place: MeetingPlace, log_dir: str | None, say: _Say) -> _Say:
    """Print the lines before the nodes meet. A ``log_dir`` of None: no logs.

    Return the printer of lines common to all launchers: ``say``, or nothing if the first node's prints them.
    """
    options = line.options
    announce: _Say = say if line.says_all or place.is_first else lambda _text: None
    for warning in options.warnings:
        say(f"warning: {warning}")
    announce(summary(options))
    if log_dir is not None:
        given = (options.log_dir, line.namespace.log_dir, line.where.log_name)
        # else each node makes a name up
        is_everywhere = any(name and name != os.devnull for name in given)
        (announce if is_everywhere else say)(f"logs: {log_dir}")
        doubt = directories.doubt_about(log_dir)
        if doubt is not None:
            say(f"warning: {doubt}")
    if line.taken:
        announce(line.taken)
    if place.note:
        announce(place.note)
    if options.observe_only:
        announce(launcher_lines.OBSERVING_ONLY)
    return announce


@dataclass
class _JobLife:
    """This launcher's part in one life of the job, from joining it to its end."""

    _node: LauncherNode
    _place: MeetingPlace
    _config: LaunchConfig
    _command: Sequence[str]
    _result: ResultFile

    def run(self) -> LauncherEnd:
        """Return how the job has ended, as far as this launcher can say, having written it to the result file."""
        private_names.say_nothing_of_death_signals()
        if self._place.is_first:
            self._node.files.look()
        place, result, node = self._place, self._result, self._node
        coordination: Coordination | None = None
        try:
            with joining.joined(
                node, place, self._config, on_decision=self._decided, is_finished=self._has_finished
            ) as coordination:
                self._train(coordination)
                # before the coordinator ends: a launcher that comes too late finds either the coordinator or the result
                assert node.over is not None
                end = end_of(node.over, node.line)
                self._write_end(end, coordination)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is: one line, an end in result.json, an exit in order
            why = error
            if (
                coordination is not None
                and coordination.member.has_given_up
                and read_lives(node.log_dir).has_finished(place.me.job)
            ):
                why = joining.AlreadyFinishedError("the job finished before, as its result.json says: nothing to do")
            end = replace(self._end_by(why), error=why)
            self._write_end(end, coordination)
        decided = None if coordination is None else coordination.member.decided
        complete = node.keeper.complete_snapshot()
        if end.is_resumable and decided is not None and complete is not None:
            node.files.write(
                *complete,
                decided.decision.founding,
                asked_s=node.signals.asked_s,
                persistent=checkpointed(self._node.line.options.checkpoint_iteration_file),
                is_hurried=lambda: node.signals.is_in_a_hurry,
            )
        if TOLD_BY not in os.environ and self._node.line.max_nodes > 1:  # a job of one node has no other to prefer
            for name, reason in result.bad_nodes().items():
                node.say(advice(self._node.line.where.scheduler, name, reason))
        if self._node.line.where.are_pods:
            kubernetes.write_reason(end.reason)
        return end

    def _has_finished(self) -> bool:
        # only if a scheduler's id distinguishes this start from all others: a user may reuse a chosen id
        if not self._place.me.names_life:
            return False
        lives = read_lives(self._node.log_dir)
        if not self._node.line.where.are_pods:
            return lives.has_finished(self._place.me.job)
        # a pod is started again within minutes; a new Job may have an old name
        since = utc(time.time() - _POD_BACK_S)
        return lives.has_finished(self._place.me.job, self._command, since=since)

    def _train(self, coordination: Coordination) -> None:
        entrypoint, *arguments = self._command
        self._node.start(self._command)
        agent = functools.partial(FaultTolerantAgent, launcher=self._node, coordination=coordination)
        with private_names.replaced(private_names.launcher_api, "LocalElasticAgent", agent):
            launch: Callable[..., object] = elastic_launch(self._config, entrypoint)
            if "TORCHELASTIC_ERROR_FILE" in os.environ:  # a scheduler asks for that of the root cause, as of torchrun
                launch = record(launch)
            launch(*arguments)

    def _decided(self, decision: OfMember) -> None:
        match decision:
            case Assignment(place=None) | Stay():
                self._result.place = None  # others tell how the job ends
            case Assignment():
                self._result.begun(decision)
            case Verdict():
                self._result.concluded(decision)
        self._node.put(decision)

    def _write_end(self, end: LauncherEnd, coordination: Coordination | None) -> None:
        held = None if coordination is None else coordination.member.decided
        decided = None if held is None else held.decision
        self._result.ended(end, decided=decided, accounting=self._node.status.accounting())
        if end.ending is not None and self._result.place is not None and self._node.status.is_spokesman:
            self._node.telemetry.ended(end.ending, end.code, end.cause)

    def _end_by(self, error: Exception) -> LauncherEnd:
        """Print the error if it isn't printed yet. Return the end."""
        match error:
            case ChildFailedError() | JobOverError() if self._node.over is not None:
                if isinstance(error, ChildFailedError):
                    # torch's table of the failures, with the script's name in its title and without a traceback
                    table = str(ChildFailedError(self._node.line.namespace.training_script, error.failures))
                    LAUNCHER.put(DEBUG, "\n".join(map(printable, table.split("\n"))))  # our own line has said it
                return end_of(self._node.over, self._node.line)
            case joining.AlreadyFinishedError():
                self._node.say(str(error))
                return LauncherEnd(0)
            case SignalException():
                if self._node.over is None:  # it came before the machine, which reports it otherwise
                    name = signal.Signals(error.sigval).name
                    self._node.say(cycle_lines.asked_to_stop(name=name, ranks=0, timeout_s=0.0))
                    self._node.log.write(records.StopRequested(signal=name, ranks=0))
                return end_of(self._node.over or stopped(error.sigval, well=False), self._node.line)
            case FaultToleranceError():
                self._node.say(text := str(error))
            case OSError():
                # a full disk, no descriptor left: a problem of the machine, which a traceback doesn't explain
                self._node.say(text := launcher_lines.launcher_failed(error))
            case _:
                text = report_unforeseen(error, self._node.log, self._node.say)
        # the launcher itself has failed, not its ranks: other nodes go on without it
        return LauncherEnd(1, Ending.FAILED if self._node.line.max_nodes == 1 else None, text)


def report_unforeseen(error: Exception, log: EventLog, say: Callable[[str], None]) -> str:
    """Report a bug here or in torch that has failed the launcher and log its traceback. Return the printed line."""
    text, trace = launcher_lines.launcher_failed(error), "".join(traceback.format_exception(error))
    log.write(records.LauncherFailed(text=text, traceback=trace))
    if log.path:
        say(f"{text} (its traceback is in {log.path})")
    else:
        say(text)
        LAUNCHER.put(ERROR, "\n".join(map(printable, trace.rstrip().split("\n"))))
    return text
