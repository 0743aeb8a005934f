"""This launcher's part in the control plane of its job: the member's machine with its clock, connection and effects.

The agent's machine ``tell``s how the node stands. Everything happens on the launcher's loop; nothing here waits: a
thread looks up the leader's host and connects, as a name server may be silent for minutes.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import time
from collections.abc import Callable, Iterable

from megatron_ft.errors import ProtocolError
from megatron_ft.exit_codes import MISTAKE_CODE
from megatron_ft.job.connection import Connection
from megatron_ft.job.parts import SAID_BY_PARTS
from megatron_ft.job.rules import actions
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.decisions import Assignment
from megatron_ft.job.rules.member import Member
from megatron_ft.launcher.rules.coordinator_view import CoordinatorView
from megatron_ft.link import tcp
from megatron_ft.link.base.codec import Vocabulary
from megatron_ft.link.base.mailbox import Mailbox
from megatron_ft.link.base.rate_limiter import RateLimiter
from megatron_ft.link.reactor import Reactor, Timer
from megatron_ft.link.secure_channel import SecretError
from megatron_ft.link.wire import PROTOCOL_VERSION, VersionError, decode, encode

_TO_MEMBER: Vocabulary[m.ToMember] = Vocabulary(m.TO_MEMBER | SAID_BY_PARTS)


class Coordination:
    """One launcher's, for the whole job: at most one connection, to the leader that the member wants.

    Args:
        secret: of the job; None if it has none.
        open_store: opens a store in which the ranks of a cycle meet, in place of the last one; the address that other
            nodes reach it at. It may wait for a name server, and is called in a thread.
        close_store: closes it, where another node has the store of the cycle.
        say: gets a line for the user.
        on_decision: gets what the coordinator has decided for this node.
        progress: returns a count that rises while ranks of this node make progress; None if they tell of none.
        dial: connects to a host and a port.
    """

    def __init__(
        self,
        member: Member,
        *,
        reactor: Reactor,
        secret: bytes | None,
        open_store: Callable[[], str],
        close_store: Callable[[], None] = lambda: None,
        say: Callable[[str], None],
        on_decision: Callable[[actions.OfMember], None],
        progress: Callable[[], int | None] = lambda: None,
        dial: Callable[[str, int], socket.socket] = tcp.connect,
    ) -> None:
        self.member = member
        self.orders = CoordinatorView()
        self._on_decision, self._say, self._progress = on_decision, say, progress
        self._open_store, self._close_store, self._secret, self._dial = open_store, close_store, secret, dial
        self._reactor = reactor
        self._timer: Timer | None = None
        self._mailbox: Mailbox[actions.MemberEffect] = Mailbox(self._carry_out, is_open=lambda: not self.orders.left)
        self._limiter = RateLimiter()
        self._address = ""
        """Address of the connection, made or in progress; empty if none."""
        self._connecting: set[str] = set()
        """Addresses to which a thread connects."""
        self._known: dict[str, str] = {}
        """The last address of each ``host:port``: name servers may be away. Used once, as the host may have moved."""
        self.connection: Connection[m.ToMember] | None = None

    def start(self) -> None:
        self._do(self.member.tick(time.monotonic()))

    def close(self, within_s: float = 0.5) -> None:
        """Leave; what is unsent has ``within_s`` seconds to go."""
        if self._timer is not None:
            self._timer.cancel()
        if self.connection is not None:
            self.connection.close(within_s=within_s)
        self.connect()

    @property
    def next_cycle(self) -> int:
        """The number of the cycle that would begin now."""
        decided = self.member.decided
        return 0 if decided is None else decided.decision.cycle + 1

    def tell(self, message: m.NodeMessage) -> None:
        self._do(self.member.tell(message, time.monotonic()))

    # -- what etcd says ---------------------------------------------------------------------------------------

    @property
    def may_lead(self) -> bool:
        """True if this launcher may start the leader: not for a job that has excluded it."""
        return self.orders.left is None and self.member.standing.phase is not m.NodePhase.EXCLUDED

    def leader_at(self, address: str, epoch: int, revision: int) -> None:
        self._do(self.member.leader_at(address, epoch, revision, time.monotonic()))

    # -- the connection ---------------------------------------------------------------------------------------

    def connect(self, address: str = "") -> None:
        """Give up the connection, and connect to ``host:port``, if that is given. The loop tells the member the result.

        The other end sees a reset: the connection may be resumed.
        """
        if self.connection is not None:
            self.connection.close(resets=True)
        self.connection, self._address = None, address
        if not address or address in self._connecting:
            return  # what an earlier attempt has begun is for this one
        known = self._known.pop(address, "")

        def dial() -> socket.socket:
            host, port = tcp.parse_address(address)
            with contextlib.suppress(OSError):
                if known:
                    return self._dial(known, port)
            return self._dial(host, port)

        try:
            self._reactor.call_in_thread(dial, functools.partial(self._connected, address))
        except (OSError, RuntimeError) as error:  # no descriptor is free, or no thread
            self._broken(str(error))
        else:
            self._connecting.add(address)

    def transmit(self, message: m.FromMember) -> None:
        """Send a message, if the connection is open."""
        if self.connection is not None:
            self.connection.send(encode(message))

    def _connected(self, address: str, result: Callable[[], socket.socket]) -> None:
        """The thread has ended. Its connection may come too late for the attempt that wanted it."""
        self._connecting.discard(address)
        is_awaited = address == self._address
        try:
            sock = result()
        except (OSError, ProtocolError) as error:
            if is_awaited:
                problem = getattr(error, "strerror", "") or str(error)
                is_unknown = isinstance(error, socket.gaierror)
                self._broken(f"the host name cannot be resolved: {problem}" if is_unknown else problem)
            return
        if not is_awaited:
            self._know(sock, address)
            sock.close()
            return
        self.connection = Connection(
            *(self._reactor, sock),
            secret=self._secret,
            connects=True,
            parse=lambda body: _TO_MEMBER.parse(decode(body)),
            proven=self._opened,
            heard=self._heard,
            ended=self._ended,
        )

    def _know(self, sock: socket.socket, address: str) -> None:
        with contextlib.suppress(OSError):  # it was reset meanwhile
            if peer := sock.getpeername():  # else it is in this process
                self._known[address] = peer[0]

    def _opened(self) -> None:
        """Connected, and the coordinator has proved the secret."""
        self._do(self.member.opened(time.monotonic()))

    def _broken(self, *problem: str) -> None:
        self._do(self.member.broken(time.monotonic(), *problem))

    def _heard(self, message: m.ToMember) -> None:
        if isinstance(message, m.Admitted) and self.connection is not None:
            self._know(self.connection.sock, self._address)
        self._do(self.member.heard(message, time.monotonic()))

    def _ended(self, problem: OSError | ProtocolError | None) -> None:
        assert self.connection is not None
        address = self._address
        if isinstance(problem, VersionError):
            ours = f"this launcher version {PROTOCOL_VERSION}: all nodes need the same megatron_ft"
            problem = SecretError(f"speaks version {problem.theirs} of the protocol, {ours}")
        if not isinstance(problem, SecretError):  # it has ended, or it is no coordinator
            if self.connection.channel is not None and isinstance(problem, ProtocolError):
                self._say_seldom(f"closed the connection to the coordinator at {address}: {problem}")
            self._broken()
        elif self.member.was_reached:
            # any process can say that: it ends no launcher that has met a coordinator of its job
            self._say_seldom(f"the coordinator at {address} {problem}; looking for another one")
            self._broken(str(problem))
        else:
            self._heard(m.Dismiss(MISTAKE_CODE, f"the coordinator at {address} {problem}"))

    def _say_seldom(self, text: str) -> None:
        if line := self._limiter.admit(text, time.monotonic()):
            self._say(line)

    # -- what follows -----------------------------------------------------------------------------------------

    def _do(self, effects: Iterable[actions.MemberEffect]) -> None:
        if not self._mailbox.post(effects):
            return
        if self._timer is not None:
            self._timer.cancel()
        if self.orders.left is None:
            self._timer = self._reactor.call_later(
                self.member.alarm_s - time.monotonic(),
                lambda: self._do(self.member.tick(time.monotonic(), self._progress())),
            )

    def _carry_out(self, effect: actions.MemberEffect) -> None:
        match effect:
            case actions.Connect(address):
                self.connect(address)
            case actions.Transmit(message):
                self.transmit(message)
            case actions.OpenStore():
                self._reactor.call_in_thread(self._open_store, self._store_opened)
            case _:
                if isinstance(effect, m.Dismiss):
                    self.orders.hear(effect)  # there may be no agent yet
                if isinstance(effect, Assignment) and effect.place:  # that of a spare is for a later cycle
                    self._close_store()
                self._on_decision(effect)

    def _store_opened(self, address: Callable[[], str]) -> None:
        if self.orders.left is None:
            self._do(self.member.store_opened(address(), time.monotonic()))
