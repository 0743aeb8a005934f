"""Connection of this launcher to the coordinator: the member's machine with its clock, its connection, its effects.

The agent's machine ``tell``s how the node stands. Everything happens on the launcher's loop; nothing here waits.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterable

from megatron_ft.core.job import actions
from megatron_ft.core.job import messages as m
from megatron_ft.core.job.assignment import NodeAssignments
from megatron_ft.core.job.decisions import Assignment, Ballot
from megatron_ft.core.job.member import Member
from megatron_ft.core.mailbox import Mailbox
from megatron_ft.launcher.coordination.transport import Listener, Transport
from megatron_ft.link.reactor import Reactor, Timer

CoordinatorDecision = actions.Begin | actions.StandBy | actions.LeftOut | actions.Leave | m.PrintJobLines | m.OfCycle


class Coordination:
    """One launcher's, for the whole job.

    Args:
        transport: makes the connection, given the `Listener` that it calls.
        announce: says something to ``host:port``, on a connection of its own.
        kill_coordinators: kills the coordinators that this launcher has started, but for one at that address.
        open_store: opens the store in which the ranks of a cycle meet; the address that other nodes reach it at. It may
            wait for a name server, and is called in a thread.
        on_decision: gets what the coordinator has decided for this node.
        says_all: lines that another launcher of the job prints are printed here, too.
    """

    def __init__(
        self,
        identity: m.Identity,
        *,
        transport: Callable[[Listener], Transport],
        open_store: Callable[[], str],
        announce: Callable[[str, m.Moved], None] = lambda _address, _moved: None,
        kill_coordinators: Callable[[str], None] = lambda _address: None,
        reactor: Reactor,
        say: Callable[[str], None],
        on_decision: Callable[[CoordinatorDecision], None],
        says_all: bool = False,
    ) -> None:
        self.member = Member(identity, now_s=time.monotonic(), chance=random.Random())
        self.assignment = NodeAssignments()
        self.left: actions.Leave | None = None
        """This launcher's job is over."""
        self._on_decision = on_decision
        self._open_store = open_store
        self._announce = announce
        self._kill_coordinators = kill_coordinators
        self._reactor = reactor
        self._say = say
        self._says_all = says_all
        self._timer: Timer | None = None
        self._store: tuple[Ballot, str] | None = None
        """The decision for which a store was opened last, and its address."""
        self._wants_store: Assignment | None = None
        """The last decision for which one is wanted, while one is being opened; else None."""
        self._mailbox: Mailbox[actions.MemberEffect] = Mailbox(self._carry_out, is_open=lambda: self.left is None)
        self._transport = transport(self)

    def start(self) -> None:
        self._do(self.member.tick(time.monotonic()))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._transport.close()

    @property
    def next_cycle(self) -> int:
        """The number of the cycle that would begin now."""
        decided = self.member.memory.decided
        return 0 if decided is None else decided.decision.cycle + 1

    # -- what the agent says ----------------------------------------------------------------------------------

    def tell(self, message: m.NodeMessage) -> None:
        """Tell the coordinator; after a `Goodbye` ``left`` is set within its ``within_s``."""
        self._do(self.member.tell(message, time.monotonic()))

    # -- what the connection says -----------------------------------------------------------------------------

    def opened(self) -> None:
        self._do(self.member.opened(time.monotonic()))

    def failed(self, problem: str, *, is_unowned: bool = True) -> None:
        self._do(self.member.failed(time.monotonic(), problem, is_unowned=is_unowned))

    def broken(self, *, silent: bool = False) -> None:
        self._do(self.member.broken(time.monotonic(), silent=silent))

    def refused(self, text: str) -> None:
        self.heard(m.Dismiss(m.REFUSED, text))

    def gave_up(self, text: str) -> None:
        """This launcher can't keep a coordinator alive; where the job begins, there is none then."""
        if self.member.memory.decided is None and self.member.identity.address == self.member.identity.endpoints[0]:
            self._leave(actions.Leave(1, text))
        else:
            self._say(text)

    def heard(self, message: m.ToMember) -> None:
        self._do(self.member.heard(message, time.monotonic()))

    # -- what follows -----------------------------------------------------------------------------------------

    def _do(self, effects: Iterable[actions.MemberEffect]) -> None:
        if not self._mailbox.post(effects):
            return
        if self._timer is not None:
            self._timer.cancel()
        if self.left is None:
            self._timer = self._reactor.call_later(self.member.alarm_s - time.monotonic(), self._tick)

    def _tick(self) -> None:
        self._do(self.member.tick(time.monotonic()))

    def _carry_out(self, effect: actions.MemberEffect) -> None:
        match effect:
            case (
                actions.Connect()
                | actions.Disconnect()
                | actions.Transmit()
                | actions.Announce()
                | actions.KillCoordinators()
            ):
                self._send(effect)
            case actions.OpenStore(held):
                self._provide_store(held)
            case actions.Say(text):
                self._say(text)
            case m.Tell(text, is_copy):
                if self._says_all or not is_copy:
                    self._say(text)
            case actions.Leave():
                self._leave(effect)
            case _:
                self._on_decision(effect)

    def _send(
        self,
        effect: actions.Connect | actions.Disconnect | actions.Transmit | actions.Announce | actions.KillCoordinators,
    ) -> None:
        match effect:
            case actions.Connect(address):
                self._transport.connect(address)
            case actions.Disconnect():
                self._transport.disconnect()
            case actions.Transmit(message):
                self._transport.transmit(message)
            case actions.Announce(address, moved):
                self._announce(address, moved)
            case actions.KillCoordinators(address):
                self._kill_coordinators(address)

    def _provide_store(self, held: Assignment) -> None:
        """Opened once for each decision, which may be proposed again; one after the other, as they may share a port."""
        if self._wants_store is not None:
            self._wants_store = held
        elif self._store is not None and self._store[0] == held.decision.value:
            self._do(self.member.store_opened(held, self._store[1], time.monotonic()))
        else:
            self._wants_store = held
            self._reactor.call_in_thread(self._open_store, functools.partial(self._store_opened, held))

    def _store_opened(self, held: Assignment, address: Callable[[], str]) -> None:
        wanted, self._wants_store = self._wants_store, None
        if self.left is None and wanted is not None:
            self._store = held.decision.value, address()
            self._provide_store(wanted)

    def _leave(self, leave: actions.Leave) -> None:
        if self.left is None:
            self.left = leave
            self._on_decision(leave)
