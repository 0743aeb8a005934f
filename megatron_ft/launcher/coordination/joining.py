"""The launcher takes its part in the control plane of its job, and gives it back at the end."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import time
import uuid
from collections.abc import Callable, Iterator

from msgspec.structs import replace
from torch.distributed.launcher.api import LaunchConfig

from megatron_ft.errors import ConfigError, FaultToleranceError
from megatron_ft.job.coordination import Coordination
from megatron_ft.job.endpoint import listen_at
from megatron_ft.job.etcd_client import EtcdClient
from megatron_ft.job.leader_process import LeaderProcess
from megatron_ft.job.lock import EtcdLock
from megatron_ft.job.parts import LEADER_PARTS
from megatron_ft.job.rules.actions import OfMember
from megatron_ft.job.rules.coordinator import Coordinator
from megatron_ft.job.rules.etcd_keys import EtcdAway, Seen, look
from megatron_ft.job.rules.member import Member
from megatron_ft.job.rules.messages import JobDefinition, LeaderStart
from megatron_ft.job.service import Service
from megatron_ft.launcher.coordination.meeting_place import MeetingPlace
from megatron_ft.launcher.coordination.rendezvous import CoordinatedRendezvous
from megatron_ft.launcher.cycle.node import LauncherNode
from megatron_ft.link.secret import read_secret
from megatron_ft.link.tcp import connect, format_address, parse_address


class AlreadyFinishedError(FaultToleranceError):
    """The job had finished before this launcher came; the text says so."""


@contextlib.contextmanager
def joined(
    node: LauncherNode,
    place: MeetingPlace,
    config: LaunchConfig,
    *,
    on_decision: Callable[[OfMember], None],
    is_finished: Callable[[], bool] = lambda: False,
) -> Iterator[Coordination]:
    """Be a member of the job, and have torch's agent meet by what the leader decides.

    Args:
        node: its reactor serves the connection, and a leader that it starts is one of its children.
        on_decision: as in `Coordination`.
        is_finished: tells if this life has finished without this launcher: its leader may have come and gone. Not asked
            where another launcher of this machine holds the lock.

    Raises:
        ConfigError, AlreadyFinishedError: the secret, the endpoint or etcd can't be used, or the job has finished.
    """
    me, reactor, stop = place.me, node.reactor, node.signals
    defined, secret = JobDefinition(me.job, me.rules), None if place.is_alone else read_secret(os.environ)
    within, listener = None, _listen(me.endpoint) if me.is_here else None
    if place.is_alone:
        within = Service(reactor, Coordinator(uuid.uuid4().hex, defined, now_s=time.monotonic(), parts=LEADER_PARTS))
    elif (listener is not None or not me.is_here) and is_finished():
        if listener is not None:
            listener.close()
        raise AlreadyFinishedError("the job finished before this launcher joined: nothing to do")
    if listener is not None:  # at any free port, perhaps
        me = replace(me, endpoint=format_address(parse_address(me.endpoint)[0], listener.getsockname()[1]))
    meeting = CoordinatedRendezvous(config, place.here, place.ranks_port)
    coordination = Coordination(
        Member(me, now_s=time.monotonic(), chance=random.Random()),
        secret=secret,
        dial=connect if within is None else within.dial,
        open_store=meeting.open_store,
        close_store=meeting.close_store,
        reactor=reactor,
        say=node.say,
        on_decision=on_decision,
        progress=node.status.progress,
    )
    meeting.orders = coordination.orders
    leader = LeaderProcess(reactor, coordination.member, LeaderStart(defined, secret, etcd=place.etcd), node.say)
    node.children.append(leader.pids)
    lock: LeaderProcess | EtcdLock = leader
    if place.etcd is not None:
        call = EtcdClient(place.etcd)
        with contextlib.suppress(EtcdAway):  # it may come up later; what is wrong with it is a mistake of the user
            stop.blocking(lambda: look(call, me.job))
        lock = EtcdLock(reactor, leader, call, coordination, place.here)
    elif me.is_here:
        leader.begin(Seen(me.endpoint, 0, 0), listener)
    coordination.start()
    try:
        yield coordination
    finally:
        meeting.close_store()
        coordination.close()
        if within is not None:
            within.close()
        lock.close(is_in_a_hurry=lambda: stop.is_in_a_hurry)


def _listen(endpoint: str) -> socket.socket | None:
    """Return the port of the endpoint, which is this machine; None if a process has it: the lock tries again."""
    try:
        return listen_at(*parse_address(endpoint))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise ConfigError(f"the rendezvous endpoint {endpoint} can't be used: {error.strerror}") from None
