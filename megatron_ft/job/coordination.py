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
from megatron_ft.job.connection import Connection, parse
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
from megatron_ft.link.secret import SecretError
from megatron_ft.link.secure_channel import FrameError, Role
from megatron_ft.link.wire import PROTOCOL_VERSION, VersionError, encode

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
        says_all: lines that another launcher of the job prints are printed here, too.
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
        says_all: bool = False,
        progress: Callable[[], int | None] = lambda: None,
        dial: Callable[[str, int], socket.socket] = tcp.connect,
    ) -> None:
        self.member = member
        self.orders = CoordinatorView()
        self.left: m.Dismiss | None = None
        """This launcher's job is over."""
        self._on_decision, self._say, self._says_all, self._progress = on_decision, say, says_all, progress
        self._open_store, self._close_store, self._secret, self._dial = open_store, close_store, secret, dial
        self._reactor = reactor
        self._timer: Timer | None = None
        self._stores_wanted = 0
        """Number of stores that are to be opened, the one that is being opened included."""
        self._mailbox: Mailbox[actions.MemberEffect] = Mailbox(self._carry_out, is_open=lambda: self.left is None)
        self._limiter = RateLimiter()
        self._was_let_in = False
        """A coordinator has proved that it knows the secret: it is no mistake of the user if another process can't."""
        self._address = ""
        """Address of the connection, made or in progress; empty if none."""
        self.connecting: set[str] = set()
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
        self.disconnect(resets=False, within_s=within_s)

    @property
    def next_cycle(self) -> int:
        """The number of the cycle that would begin now."""
        decided = self.member.decided
        return 0 if decided is None else decided.decision.cycle + 1

    def tell(self, message: m.NodeMessage) -> None:
        """Tell the coordinator; after a `Goodbye` ``left`` is set within its ``within_s``."""
        self._do(self.member.tell(message, time.monotonic()))

    # -- what etcd says ---------------------------------------------------------------------------------------

    @property
    def may_lead(self) -> bool:
        """True if this launcher may start the leader: not for a job that has excluded it."""
        return self.left is None and self.member.standing.phase is not m.NodePhase.EXCLUDED

    def leader_at(self, address: str, epoch: int, revision: int) -> None:
        self._do(self.member.leader_at(address, epoch, revision, time.monotonic()))

    # -- the connection ---------------------------------------------------------------------------------------

    def connect(self, address: str) -> None:
        """Connect to ``host:port``, and give up the connection before. The loop tells the member how that went."""
        self.disconnect()
        self._address = address
        if address in self.connecting:
            return  # what an earlier attempt has begun is for this one
        try:
            dial = functools.partial(self._dial_host, self._known.pop(address, ""), *tcp.parse_address(address))
            self._reactor.call_in_thread(dial, functools.partial(self._connected, address))
        except (ProtocolError, OSError, RuntimeError) as error:  # the last two: no descriptor is free, or no thread
            self._fail(str(error))
        else:
            self.connecting.add(address)

    def _dial_host(self, known: str, host: str, port: int) -> socket.socket:
        if known not in ("", host):
            with contextlib.suppress(OSError):
                return self._dial(known, port)
        return self._dial(host, port)

    def _know(self, sock: socket.socket, address: str) -> None:
        if sock.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # it was reset meanwhile
                self._known[address] = sock.getpeername()[0]

    def disconnect(self, *, resets: bool = True, within_s: float = 0.0) -> None:
        """Give up the connection. If it may be resumed, the other end sees a reset."""
        connection, self.connection, self._address = self.connection, None, ""
        if connection is not None:
            connection.close(resets=resets, within_s=within_s)

    def transmit(self, message: m.FromMember) -> None:
        """Send a message, if the connection is open."""
        if self.connection is not None and self.connection.is_proven:
            self.connection.send(encode(message))

    def _connected(self, address: str, result: Callable[[], socket.socket]) -> None:
        """The thread has ended. Its connection may come too late for the attempt that wanted it."""
        self.connecting.discard(address)
        is_awaited = address == self._address
        try:
            sock = result()
        except OSError as error:
            if is_awaited:
                is_unknown = isinstance(error, socket.gaierror)
                problem = error.strerror or str(error)
                text = f"the host name cannot be resolved: {problem}" if is_unknown else problem
                self._fail(text, is_unowned=not is_unknown)
            return
        if not is_awaited:
            self._know(sock, address)
            sock.close()
            return
        self.connection = Connection(
            *(self._reactor, sock),
            secret=self._secret,
            role=Role.CONNECTS,
            parse=functools.partial(parse, _TO_MEMBER),
            proven=self._opened,
            heard=self._heard,
            ended=self._ended,
        )
        if self._secret is None:
            self._opened()

    def _opened(self) -> None:
        """Connected, and the coordinator has proved the secret, if there is one."""
        self._was_let_in = self._secret is not None
        self._do(self.member.opened(time.monotonic()))

    def _fail(self, problem: str, *, is_unowned: bool = False) -> None:
        """The connection can't be made. ``is_unowned``: no process is there; False also if the host isn't known."""
        self.disconnect()
        self._do(self.member.failed(time.monotonic(), problem, is_unowned=is_unowned))

    def _heard(self, message: m.ToMember) -> None:
        if isinstance(message, m.Admitted) and self.connection is not None:
            self._know(self.connection.sock, self._address)
        self._do(self.member.heard(message, time.monotonic()))

    def _ended(self, problem: ProtocolError | None) -> None:
        assert self.connection is not None
        address, is_proven = self._address, self.connection.is_proven
        self.disconnect()
        if isinstance(problem, VersionError):
            ours = f"this launcher version {PROTOCOL_VERSION}: all nodes need the same megatron_ft"
            problem = SecretError(f"speaks version {problem.theirs} of the protocol, {ours}")
        if isinstance(problem, FrameError):
            self._say_seldom(f"closed the connection to the coordinator at {address}: {problem}")
        if not isinstance(problem, SecretError):  # it has ended, or it is no coordinator
            self._do(self.member.broken(time.monotonic()))
        elif self._was_let_in and not is_proven:
            # any process can say that: it ends no launcher that has met a coordinator of its job
            self._say_seldom(f"the coordinator at {address} {problem}; looking for another one")
            self._fail(str(problem))
        else:
            self._heard(m.Dismiss(m.REFUSED, f"the coordinator at {address} {problem}"))

    def _say_seldom(self, text: str) -> None:
        if line := self._limiter.admit(text, time.monotonic()):
            self._say(line)

    # -- what follows -----------------------------------------------------------------------------------------

    def _do(self, effects: Iterable[actions.MemberEffect]) -> None:
        if not self._mailbox.post(effects):
            return
        if self._timer is not None:
            self._timer.cancel()
        if self.left is None:
            self._timer = self._reactor.call_later(
                self.member.alarm_s - time.monotonic(),
                lambda: self._do(self.member.tick(time.monotonic(), self._progress())),
            )

    def _carry_out(self, effect: actions.MemberEffect) -> None:
        match effect:
            case actions.Connect(address):
                self.connect(address)
            case actions.Disconnect():
                self.disconnect()
            case actions.Transmit(message):
                self.transmit(message)
            case actions.OpenStore():
                self._stores_wanted += 1
                if self._stores_wanted == 1:
                    self._reactor.call_in_thread(self._open_store, self._store_opened)
            case m.Tell(text, printer):
                if self._says_all or printer in ("", self.member.identity.instance):
                    self._say(text)
            case m.Dismiss():
                if self.left is None:
                    self.left = effect
                    self._on_decision(effect)
            case _:
                if isinstance(effect, Assignment) and effect.place:  # that of a spare is for a later cycle
                    self._close_store()
                self._on_decision(effect)

    def _store_opened(self, address: Callable[[], str]) -> None:
        """A store is open. One that was asked for meanwhile comes after it, as they may share a port."""
        wanted, self._stores_wanted = self._stores_wanted, 0
        if self.left is not None:
            return
        at = address()
        if wanted > 1:
            self._do([actions.OpenStore()])
        else:
            self._do(self.member.store_opened(at, time.monotonic()))
