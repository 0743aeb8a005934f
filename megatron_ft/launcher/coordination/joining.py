"""The launcher takes its part in the control plane of its job, and gives it back at the end."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torch.distributed.launcher.api import LaunchConfig

from megatron_ft.core.errors import FaultToleranceError
from megatron_ft.core.job.member import Member
from megatron_ft.core.job.messages import Identity, JobDefinition
from megatron_ft.core.job.restart_policy import JobProgress
from megatron_ft.ipc.linux.processes import age_s
from megatron_ft.ipc.net.secret import read_secret
from megatron_ft.ipc.net.tcp import parse_address
from megatron_ft.launcher.base.signals import StopRequests
from megatron_ft.launcher.coordination import rendezvous
from megatron_ft.launcher.coordination.coordination import Coordination, CoordinatorDecision
from megatron_ft.launcher.coordination.coordinator_connection import Announcer, CoordinatorConnection
from megatron_ft.launcher.coordination.coordinator_process import CoordinatorProcess
from megatron_ft.launcher.coordination.endpoint import check_names_one_host, listen_anywhere, take_again, take_endpoint
from megatron_ft.launcher.coordination.meeting_place import Kind, MeetingPlace
from megatron_ft.launcher.coordination.rank_store import RankStore, own_host
from megatron_ft.launcher.coordination.transport import InProcess
from megatron_ft.launcher.processes.process_tree import Children
from megatron_ft.link.reactor import Reactor, Timer


class AlreadyFinishedError(FaultToleranceError):
    """The job had finished before this launcher came; the text says so."""


@dataclass(frozen=True)
class JoinContext:
    """Parts of a launcher that joins a job.

    Args:
        children: of the launcher; a coordinator that it starts is one of them.
        says_all: the lines of other nodes are printed, too.
    """

    reactor: Reactor
    stop: StopRequests
    children: Children
    say: Callable[[str], None]
    says_all: bool


@dataclass(frozen=True)
class Past:
    """Earlier lives of the job: how far it has got, and the bad nodes, by name and why."""

    advance: JobProgress = JobProgress()  # noqa: RUF009 - frozen
    bad: Mapping[str, str] = field(default_factory=dict)


_TAKE_AGAIN_S = 0.5
_HERE = "this process"
"""The address of a coordinator that is one."""


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
    """Be a member of the job, and have torch's agent meet by what the coordinator decides.

    Args:
        past: earlier lives of the job.
        on_decision: gets what the coordinator decides for this node.
        is_finished: tells if this life has finished without this launcher; asked where the job would begin here,
            because then its coordinator may have come and gone.

    Raises:
        ConfigError: the secret or the endpoint can't be used.
        AlreadyFinishedError: it has.
    """
    endpoint = place.endpoints[0] if place.endpoints else ""
    here = launcher.stop.blocking(lambda: own_host(config.local_addr, endpoint))
    store = RankStore(here, address=place.ranks_store)
    process = announcer = None
    if place.kind is Kind.COORDINATED:
        coordination, process, announcer = _with_others(launcher, place, store, here, past, on_decision, is_finished)
    else:
        coordination = _alone(launcher, place, store, past, on_decision)
    rendezvous.register(config, assignment=coordination.assignment, store=store)
    coordination.start()
    try:
        yield coordination
    finally:
        store.close()
        coordination.close()
        if announcer is not None:
            announcer.close()
        if process is not None:
            process.close()


def _alone(
    launcher: JoinContext,
    place: MeetingPlace,
    store: RankStore,
    past: Past,
    on_decision: Callable[[CoordinatorDecision], None],
) -> Coordination:
    coordination = Coordination(
        _identity(place, _HERE, (_HERE,), past),
        transport=lambda listener: InProcess(launcher.reactor, listener),
        open_store=store.open,
        reactor=launcher.reactor,
        say=launcher.say,
        on_decision=on_decision,
    )
    coordination.member.owns(_HERE)
    return coordination


def _with_others(
    launcher: JoinContext,
    place: MeetingPlace,
    store: RankStore,
    here: str,
    past: Past,
    on_decision: Callable[[CoordinatorDecision], None],
    is_finished: Callable[[], bool],
) -> tuple[Coordination, _OwnCoordinators, Announcer]:
    secret = read_secret(os.environ)
    listener, name, is_endpoint = launcher.stop.blocking(lambda: _socket(place, here))
    is_founder = is_endpoint and place.is_founder
    if is_founder and is_finished():
        listener.close()
        raise AlreadyFinishedError("the job finished before this launcher joined: nothing to do")

    def gave_up(text: str) -> None:
        own.note_addresses()
        coordination.gave_up(text)

    def made(listener: socket.socket, name: str, *, is_endpoint: bool) -> CoordinatorProcess:
        process = CoordinatorProcess(
            launcher.reactor,
            listener,
            name,
            founds=is_endpoint and place.is_founder,
            is_endpoint=is_endpoint,
            defined=JobDefinition(place.job, place.rules, place.arguments),
            secret=secret,
            environ=os.environ,
            led_at=lambda: coordination.member.led_at,
            say=launcher.say,
            gave_up=gave_up,
        )
        launcher.children.add(process.pids)
        return process

    own = _OwnCoordinators(launcher.reactor, place, made)
    process = own.add(listener, name, is_endpoint=is_endpoint)
    endpoints = (process.address, *place.endpoints[1:]) if is_founder else place.endpoints
    announcer = Announcer(launcher.reactor, secret)
    coordination = Coordination(
        _identity(place, process.address, endpoints, past),
        transport=lambda listener: CoordinatorConnection(launcher.reactor, secret, listener, say=launcher.say),
        open_store=store.open,
        announce=announcer.announce,
        kill_coordinators=own.kill,
        reactor=launcher.reactor,
        say=launcher.say,
        on_decision=on_decision,
        says_all=launcher.says_all,
    )
    own.start(coordination.member, at_once=is_founder)
    return coordination, own, announcer


class _OwnCoordinators:
    """The sockets where this launcher starts coordinators: one at its own address, and one at the endpoint of the job.

    Where another launcher of this machine, or a coordinator that outlives its launcher, has the endpoint's port, it is
    taken as soon as that one is gone: launchers that come later look for the job there.
    """

    def __init__(self, reactor: Reactor, place: MeetingPlace, make: Callable[..., CoordinatorProcess]) -> None:
        self._reactor = reactor
        self._place = place
        self._make = make
        self._all: list[CoordinatorProcess] = []
        self._member: Member | None = None
        self._has_endpoint = place.here is None
        self._timer: Timer | None = None

    def add(self, listener: socket.socket, name: str, *, is_endpoint: bool) -> CoordinatorProcess:
        self._has_endpoint |= is_endpoint
        process = self._make(listener, name, is_endpoint=is_endpoint)
        self._all.append(process)
        return process

    def start(self, member: Member, *, at_once: bool) -> None:
        self._member = member
        for process in self._all:
            process.start(at_once=at_once)
        self.note_addresses()
        self._take_endpoint_later()

    def kill(self, address: str) -> None:
        for process in self._all:
            if process.address != address:
                process.kill()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for process in self._all:
            process.close()

    def note_addresses(self) -> None:
        assert self._member is not None
        self._member.owns(*(process.address for process in self._all if not process.is_closed))

    def _take_endpoint_later(self) -> None:
        if not self._has_endpoint:
            self._timer = self._reactor.call_later(_TAKE_AGAIN_S, self._take_endpoint)

    def _take_endpoint(self) -> None:
        assert self._place.here is not None
        name, port = parse_address(self._place.endpoints[self._place.here])
        listener = take_again(name, port)
        if listener is not None:
            self.add(listener, name, is_endpoint=True).start(at_once=False)
            self.note_addresses()
        self._take_endpoint_later()


def _socket(place: MeetingPlace, here: str) -> tuple[socket.socket, str, bool]:
    """Return this launcher's listening socket, the name of this host for others, and whether it is an endpoint.

    May wait for the one that has the port. Of several launchers on one machine, the first has it.
    """
    if place.here is not None:
        name, port = parse_address(place.endpoints[place.here])
        if not place.is_host_given:
            check_names_one_host(name, port)
        listener = take_endpoint(name, port)
        if listener is not None:
            return listener, name, True
    first, _ = parse_address(place.endpoints[0])
    return listen_anywhere(first), here, False


def _identity(place: MeetingPlace, address: str, endpoints: tuple[str, ...], past: Past) -> Identity:
    return Identity(
        job=place.job,
        rules=place.rules,
        instance=uuid.uuid4().hex,
        name=socket.gethostname(),
        address=address,
        endpoints=endpoints,
        rank=place.rank,
        before=past.advance,
        domain=place.domain,
        bad=past.bad.get(socket.gethostname(), ""),
        started_s=time.monotonic() - age_s(os.getpid()),
        names_life=place.names_life,
        is_named=place.is_named,
        has_known_host=place.has_known_host,
        arguments=place.arguments,
    )
