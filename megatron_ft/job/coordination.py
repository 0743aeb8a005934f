"""This launcher's part in the control plane of its job: the member's machine with its clock, connection and effects.

The agent's machine ``tell``s how the node stands. Everything happens on the launcher's loop; nothing here waits.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable

from megatron_ft.job.coordinator_connection import CoordinatorConnection, Listener
from megatron_ft.job.rules import actions
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.member import Member
from megatron_ft.launcher.rules.coordinator_view import CoordinatorView
from megatron_ft.link.base.mailbox import Mailbox
from megatron_ft.link.reactor import Reactor, Timer

CoordinatorDecision = (
    actions.Begin | actions.StandBy | actions.LeftOut | actions.Leave | actions.PrintsJobLines | m.OfCycle
)


class Coordination:
    """One launcher's, for the whole job.

    Args:
        transport: makes the connection, given the `Listener` that it calls.
        open_store: opens a store in which the ranks of a cycle meet, in place of the last one; the address that other
            nodes reach it at. It may wait for a name server, and is called in a thread.
        close_store: closes it, where another node has the store of the cycle.
        on_decision: gets what the coordinator has decided for this node.
        says_all: lines that another launcher of the job prints are printed here, too.
        progress: returns a count that rises while ranks of this node make progress; None if they tell of none.
    """

    def __init__(
        self,
        identity: m.Identity,
        *,
        transport: Callable[[Listener], CoordinatorConnection],
        open_store: Callable[[], str],
        close_store: Callable[[], None] = lambda: None,
        reactor: Reactor,
        say: Callable[[str], None],
        on_decision: Callable[[CoordinatorDecision], None],
        says_all: bool = False,
        progress: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.member = Member(identity, now_s=time.monotonic(), chance=random.Random())
        self.orders = CoordinatorView()
        self.left: actions.Leave | None = None
        """This launcher's job is over."""
        self._on_decision, self._say, self._says_all, self._progress = on_decision, say, says_all, progress
        self._open_store, self._close_store = open_store, close_store
        self._reactor = reactor
        self._timer: Timer | None = None
        self._stores_wanted = 0
        """Number of stores that are to be opened, the one that is being opened included."""
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
        decided = self.member.decided
        return 0 if decided is None else decided.decision.cycle + 1

    def tell(self, message: m.NodeMessage) -> None:
        """Tell the coordinator; after a `Goodbye` ``left`` is set within its ``within_s``."""
        self._do(self.member.tell(message, time.monotonic()))

    # -- what the connection says -----------------------------------------------------------------------------

    def opened(self) -> None:
        self._do(self.member.opened(time.monotonic()))

    def failed(self, problem: str, *, is_unowned: bool = True) -> None:
        self._do(self.member.failed(time.monotonic(), problem, is_unowned=is_unowned))

    def broken(self) -> None:
        self._do(self.member.broken(time.monotonic()))

    def heard(self, message: m.ToMember) -> None:
        self._do(self.member.heard(message, time.monotonic()))

    # -- what etcd says ---------------------------------------------------------------------------------------

    @property
    def may_lead(self) -> bool:
        """True if this launcher may start the leader: not for a job that has excluded it."""
        return self.left is None and self.member.standing.phase is not m.NodePhase.EXCLUDED

    def leader_at(self, address: str, epoch: int) -> None:
        self._do(self.member.leader_at(address, epoch, time.monotonic()))

    def no_leader_known(self, problem: str) -> None:
        """etcd can't be asked."""
        self._do(self.member.no_leader_known(problem, time.monotonic()))

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
                self._transport.connect(address)
            case actions.Disconnect():
                self._transport.disconnect()
            case actions.Transmit(message):
                self._transport.transmit(message)
            case actions.OpenStore():
                self._stores_wanted += 1
                if self._stores_wanted == 1:
                    self._reactor.call_in_thread(self._open_store, self._store_opened)
            case actions.Say(text, is_copy):
                if self._says_all or not is_copy:
                    self._say(text)
            case actions.Leave():
                if self.left is None:
                    self.left = effect
                    self._on_decision(effect)
            case _:
                if isinstance(effect, actions.Begin) and effect.held.place != 0:
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
