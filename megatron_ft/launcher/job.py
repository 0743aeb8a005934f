"""One job on this node, from the first rendezvous to the exit code."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megatron_ft.core.errors import ConfigError, FaultToleranceError
from megatron_ft.core.printable import printable
from megatron_ft.ipc.files.event_log import EventLog
from megatron_ft.ipc.linux import open_files
from megatron_ft.launcher.arguments import CommandLine
from megatron_ft.launcher.base import directories, lines
from megatron_ft.launcher.coordination import joining
from megatron_ft.launcher.coordination.meeting_place import Kind, MeetingPlace
from megatron_ft.launcher.cycle.agent import FaultTolerantAgent
from megatron_ft.launcher.job_errors import JobEndedError, JobLeftError, NodeExcludedError
from megatron_ft.launcher.node import Node, say
from megatron_ft.launcher.spawn.fork_server import ServerProcess
from megatron_ft.launcher.torch_compat import private_names

__all__ = ["run"]


def run(
    line: CommandLine,
    config: LaunchConfig,
    command: Sequence[str],
    *,
    place: MeetingPlace,
    log: EventLog,
    log_dir: str | None,
    server: ServerProcess | None = None,
) -> int:
    """Run the job and tidy up; the launcher's exit code. ``server`` forks ranks, if there is one already.

    A ``log_dir`` of None: no logs are written, as one of the line's warnings says.

    Raises:
        ConfigError: a mistake of the user that shows only now; no rank was started.
    """
    for warning in line.options.warnings:
        say(f"warning: {warning}")
    say(line.options.summary())
    if log_dir is not None:
        say(f"logs: {log_dir}")
        doubt = directories.doubt_about(log_dir)
        if doubt is not None:
            say(f"warning: {doubt}")
    if place.note:
        say(place.note)
    if line.options.observe_only:
        say(lines.OBSERVING_ONLY)
    log.write("config", values=line.options.sources_for_log(), command=list(command))
    log.write("meeting", how=place.kind.value, endpoints=place.endpoints, rank=place.rank, rank_from=place.rank_source)
    open_files.take_all()
    try:
        node = Node(line, ranks=config.nproc_per_node, log=log, log_dir=log_dir, server=server)
        try:
            code = _launch(node, place, config, command)
        finally:
            node.close()
    finally:
        open_files.give_back()
    log.write("run_ended", exit_code=code)
    return code


def _launch(node: Node, place: MeetingPlace, config: LaunchConfig, command: Sequence[str]) -> int:
    entrypoint, *arguments = command
    private_names.say_nothing_of_death_signals()
    try:
        with joining.joined(node, place, config) as coordination:
            node.start(command)
            agent = functools.partial(
                FaultTolerantAgent, node=node, coordination=coordination, meets_by_torch=place.kind is Kind.TORCH
            )
            with private_names.agent_made_by(agent, node.blocking):
                # record: an error file of the root cause for a scheduler that asks for one, as torchrun has it
                record(elastic_launch(config, entrypoint))(*arguments)
    except ChildFailedError as error:
        # torch's table of the failures, without a traceback of ours and with the script's name in its title
        table = str(ChildFailedError(node.line.namespace.training_script, error.failures))
        print("\n".join(map(printable, table.split("\n"))), file=sys.stderr, flush=True)
        return node.failure_code
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            return 128 + signal.SIGINT
        return 0 if node.ranks_ended_well else 1
    except JobEndedError:
        return node.failure_code
    except NodeExcludedError as error:
        # 0: a scheduler that ends the whole job when one node's task fails would undo what was asked for
        return 1 if error.job_ends else 0
    except JobLeftError as error:
        if str(error) or not error.code:
            say(str(error) if error.code else lines.job_went_on(str(error)))
        return error.code
    except ConfigError:
        raise
    except FaultToleranceError as error:
        say(str(error))
        return 1
    except RendezvousError as error:
        say(lines.rendezvous_failed(error))
        return 1
    except OSError as error:
        # a full disk, no descriptor left: the machine's trouble, of which a traceback tells nothing
        say(f"the launcher failed: {lines.in_one_line(error)}")
        return 1
    return 0
