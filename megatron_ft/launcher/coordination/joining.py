"""The launcher takes its part in the control plane of its job, and gives it back at the end."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.launcher.api import LaunchConfig

from megatron_ft.core.errors import FaultToleranceError
from megatron_ft.ipc.linux.process_tree import Children
from megatron_ft.ipc.linux.processes import age_s
from megatron_ft.ipc.net.secret import read_secret
from megatron_ft.ipc.net.tcp import format_address, parse_address
from megatron_ft.job.etcd_client import EtcdClient
from megatron_ft.job.rules.etcd_keys import EtcdAway, look
from megatron_ft.job.rules.messages import Identity, JobDefinition
from megatron_ft.job.rules.restart_policy import JobProgress
from megatron_ft.launcher.base.signals import StopRequests
from megatron_ft.launcher.coordination import rendezvous
from megatron_ft.launcher.coordination.coordination import Coordination, CoordinatorDecision
from megatron_ft.launcher.coordination.coordinator_connection import CoordinatorConnection
from megatron_ft.launcher.coordination.endpoint import check_names_one_host, take_again, take_endpoint
from megatron_ft.launcher.coordination.endpoint_lock import EndpointLock
from megatron_ft.launcher.coordination.etcd_lock import EtcdLock
from megatron_ft.launcher.coordination.in_process import InProcess
from megatron_ft.launcher.coordination.meeting_place import Kind, MeetingPlace
from megatron_ft.launcher.coordination.rank_store import RankStore, own_host
from megatron_ft.link.reactor import Reactor


class AlreadyFinishedError(FaultToleranceError):
    """The job had finished before this launcher came; the text says so."""


@dataclass(frozen=True)
class JoinContext:
    """Parts of a launcher that joins a job.

    Args:
        children: of the launcher; a leader that it starts is one of them.
        says_all: the lines of other nodes are printed, too.
        progress: as in `Coordination`.
    """

    reactor: Reactor
    stop: StopRequests
    children: Children
    say: Callable[[str], None]
    says_all: bool
    progress: Callable[[], int | None] = lambda: None


@dataclass(frozen=True)
class Past:
    """Earlier lives of the job: how far it has got, and the bad nodes, by name and why."""

    advance: JobProgress = JobProgress()  # noqa: RUF009 - frozen
    bad: Mapping[str, str] = field(default_factory=dict)


_HERE = "this process"
"""The address of a leader that is one."""


@contextlib.contextmanager
def joined(
    launcher: JoinContext,
    place: MeetingPlace,
    config: LaunchConfig,
    *,
    past: Past,
    on_decision: Callable[[CoordinatorDecision], None],
    is_finished: Callable[[], bool] = lambda: False,
) -> Iterator[Coordination]:
    """Be a member of the job, and have torch's agent meet by what the leader decides.

    Args:
        past: earlier lives of the job.
        on_decision: gets what the leader decides for this node.
        is_finished: tells if this life has finished without this launcher: its leader may have come and gone. Not asked
            where another launcher of this machine holds the lock.

    Raises:
        ConfigError: the secret, the endpoint or etcd can't be used.
        AlreadyFinishedError: it has.
    """
    here = launcher.stop.blocking(lambda: own_host(config.local_addr, place.endpoint))
    store = RankStore(here, address=place.ranks_store)
    defined = JobDefinition(place.job, place.rules)
    coordinated = functools.partial(
        Coordination,
        open_store=store.open,
        close_store=store.close,
        reactor=launcher.reactor,
        say=launcher.say,
        on_decision=on_decision,
        says_all=launcher.says_all,
        progress=launcher.progress,
    )
    lock: EndpointLock | EtcdLock | None = None
    if place.kind is Kind.ALONE:
        coordination = coordinated(
            _identity(place, "", _HERE, past),
            transport=lambda listener: InProcess(launcher.reactor, listener, defined),
        )
    else:
        secret = read_secret(os.environ)
        listener = launcher.stop.blocking(lambda: _listener(place))
        if (listener is not None or not place.is_here) and is_finished():
            if listener is not None:
                listener.close()
            raise AlreadyFinishedError("the job finished before this launcher joined: nothing to do")
        name, port = parse_address(place.endpoint)
        port = port if listener is None else listener.getsockname()[1]
        endpoint = format_address(name, port)
        coordination = coordinated(
            _identity(place, format_address(here, 0).rpartition(":")[0], endpoint, past),
            transport=lambda listener: CoordinatorConnection(launcher.reactor, secret, listener, say=launcher.say),
        )
        own: dict[str, Any] = {"secret": secret, "environ": os.environ, "say": launcher.say}
        if place.etcd is not None:
            call = EtcdClient(place.etcd)
            with contextlib.suppress(EtcdAway):  # it may come up later; what is wrong with it is a mistake of the user
                launcher.stop.blocking(lambda: look(call, place.job))
            lock = EtcdLock(launcher.reactor, place.etcd, call, defined, coordination, host=here, **own)
        else:
            lock = EndpointLock(
                launcher.reactor,
                endpoint,
                defined,
                listener=listener,
                take=lambda: take_again(name, port) if place.is_here else None,
                held=lambda: setattr(coordination.member, "owns", True),
                **own,
            )
    rendezvous.register(config, orders=coordination.orders, store=store)
    if lock is not None:
        launcher.children.add(lock.pids)
        if place.is_here or place.etcd is not None:
            lock.start()
    coordination.start()
    try:
        yield coordination
    finally:
        store.close()
        coordination.close()
        if lock is not None:
            lock.close(is_in_a_hurry=launcher.stop.is_in_a_hurry)


def _listener(place: MeetingPlace) -> socket.socket | None:
    """Listen at the endpoint, if it is this machine and no other launcher does. May wait for the one that has the port.

    Raises:
        ConfigError: the endpoint can't be used.
    """
    if not place.is_here:
        return None
    name, port = parse_address(place.endpoint)
    if not place.is_host_given:
        check_names_one_host(name, port)
    return take_endpoint(name, port)


def _identity(place: MeetingPlace, host: str, endpoint: str, past: Past) -> Identity:
    return Identity(
        job=place.job,
        rules=place.rules,
        instance=uuid.uuid4().hex,
        name=socket.gethostname(),
        host=host,
        endpoint=endpoint,
        rank=place.rank,
        before=past.advance,
        domain=place.domain,
        bad=past.bad.get(socket.gethostname(), ""),
        started_s=time.monotonic() - age_s(os.getpid()),
        names_life=place.names_life,
        is_named=place.is_named,
        has_known_host=place.has_known_host,
        is_in_etcd=place.etcd is not None,
    )
