"""Virtual time, hosts that freeze and vanish, processes that die, and a network that delays, cuts and heals.

Everything is drawn from one random source, so the same seed is the same run.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

ETCD = -1
"""Number of etcd's host in pairs of hosts between which nothing gets through."""
_SILENCE_S = (4.0, 6.0)
"""After that the kernel ends a connection (``link.tcp``): 5 s after the last answer, or the first packet without."""
_USER_TIMEOUT_S = 5.0
_RETRANSMIT_S = 0.2
"""TCP sends a lost packet again after this time, then after twice as long, and so on."""
_LAST_RETRANSMIT_S = 4.0
_HANDSHAKE_RETRANSMIT_S = 1.0
"""The same for the first packet of a connection."""


_RESET = object()
"""Sent in place of a message when a connection is reset."""


class World:
    """``now_s`` is the true time; each host has a clock of its own."""

    def __init__(self, chance: random.Random, hosts: int) -> None:
        self.chance = chance
        self.now_s = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.hosts = [Host(self, number) for number in range(hosts)]
        self.cuts: set[tuple[int, int]] = set()
        """Hosts from the first of which nothing gets to the second."""
        self.latency_s = 0.0
        """Of each packet, in one direction, at least."""
        self.loss = 0.0
        """Probability that a packet is lost."""
        self.links: list[Link] = []
        self.reports_silence = False
        """Kernels end connections whose other host answers no packet for 5 s; else only the machines notice that."""
        self.story: list[str] | None = None

    def tell(self, text: str) -> None:
        if self.story is not None:
            self.story.append(f"{self.now_s:9.3f} {text}")

    def next_number(self) -> int:
        self._count += 1
        return self._count

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, call)

    def at(self, at_s: float, call: Callable[[], None]) -> None:
        """Call then; what is to be called at the very same time is called in the order of these calls."""
        self._count += 1
        heapq.heappush(self._heap, (at_s, self._count, call))

    def run(self, until_s: float, is_over: Callable[[], bool]) -> None:
        """Let time pass. ``is_over`` is asked now and then: it looks at all launchers."""
        heap = self._heap
        while heap and not (self.events % 16 == 0 and is_over()):
            at_s, _, call = heapq.heappop(heap)
            if at_s > until_s:
                return
            self.now_s = at_s
            self.events += 1
            call()

    def delay_s(self) -> float:
        """Return how long one message takes that isn't lost."""
        is_usual = self.chance.random() >= 0.02
        return self.latency_s + (self.chance.uniform(0.0001, 0.002) if is_usual else self.chance.uniform(0.002, 0.2))

    def handshake_s(self, a: Host, b: Host) -> float:
        """Return how long it takes to open a connection."""
        return self.again_s(a, b, _HANDSHAKE_RETRANSMIT_S) + self.latency_s + self.delay_s()

    def again_s(self, a: Host, b: Host, timeout_s: float = _RETRANSMIT_S) -> float:
        """Return for how long a message is sent again and again until it gets through; mostly 0."""
        total_s = 0.0
        while a is not b and timeout_s < _LAST_RETRANSMIT_S and self.loss and self.chance.random() < self.loss:
            total_s, timeout_s = total_s + timeout_s, 2 * timeout_s
        return total_s

    def blocks(self, a: Host, b: Host) -> bool:
        """Return True if nothing gets from ``a`` to ``b``."""
        return a is not b and (not a.is_on or not b.is_on or (a.number, b.number) in self.cuts)

    def is_cut(self, a: Host, b: Host) -> bool:
        """Return True if nothing gets through in one direction or the other: no connection can be made, or goes on."""
        return self.blocks(a, b) or self.blocks(b, a)

    def cut(self, pairs: set[tuple[int, int]]) -> None:
        """Let nothing get from the first to the second of each pair of hosts."""
        self.cuts |= pairs
        for link in self.links:
            link.falls_silent()

    def heal(self, pairs: set[tuple[int, int]]) -> None:
        """It does again: what was on its way comes through, as TCP has it."""
        self.cuts -= pairs
        for link in list(self.links):
            link.retry()


class Host:
    """One machine. Its clock doesn't begin at 0, and may run a little fast; it stands still for nobody."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.is_on = True
        self.frozen_until_s = 0.0
        self._offset_s = world.chance.uniform(0.0, 1e6)
        self._rate = 1.0 + world.chance.uniform(-1e-4, 1e-4)
        self.processes: list[Process] = []
        self.hurts: list[Any] = []
        """What faults did to it, or to its network."""

    def clock_s(self) -> float:
        return self._offset_s + self.world.now_s * self._rate

    def freeze(self, seconds: float) -> None:
        self.frozen_until_s = max(self.frozen_until_s, self.world.now_s + seconds)
        for process in self.processes:
            process.freeze(seconds)
        for link in self.world.links:
            link.falls_silent()
        self.world.after(seconds, self._thaw)

    def _thaw(self) -> None:
        for link in list(self.world.links):
            link.retry()

    @property
    def is_frozen(self) -> bool:
        return self.world.now_s < self.frozen_until_s

    def power_off(self) -> None:
        """All its processes end, and nobody is told."""
        self.is_on = False
        for process in list(self.processes):
            process.die(silently=True)
        for link in self.world.links:
            link.falls_silent()


class Process:
    """Something that is called when something happens; while it is frozen, that waits."""

    def __init__(self, host: Host, name: str) -> None:
        self.host = host
        self.world = host.world
        self.name = name
        self.is_alive = True
        self.frozen_until_s = 0.0
        self.links: list[Link] = []
        self.dies_at_effect: int | None = None
        self._waiting: deque[Callable[[], None]] = deque()
        self._alarm_s = 1e18
        host.processes.append(self)

    @property
    def is_frozen(self) -> bool:
        return self.world.now_s < self.frozen_until_s

    def call(self, action: Callable[[], None]) -> None:
        """Now, or as soon as it isn't frozen."""
        if not self.is_alive:
            return
        if self.is_frozen:
            self._waiting.append(action)
        else:
            action()

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.world.after(delay_s, lambda: self.call(action))

    def wake_at(self, clock_s: float, action: Callable[[], None]) -> None:
        """When its host's clock has come so far. There is one such alarm: one that is to ring sooner counts."""
        at_s = self.world.now_s + max(0.0005, (clock_s - self.host.clock_s()) * 1.0002)
        if self._alarm_s <= at_s:
            return

        def ring() -> None:
            if self._alarm_s == at_s:
                self._alarm_s = 1e18
                self.call(action)

        self._alarm_s = at_s
        self.world.after(at_s - self.world.now_s, ring)

    def freeze(self, seconds: float) -> None:
        self.frozen_until_s = max(self.frozen_until_s, self.world.now_s + seconds)
        self.world.after(seconds, self.thaw)

    def thaw(self) -> None:
        """Do what has waited, if it isn't frozen any more."""
        while self._waiting and not self.is_frozen:
            self.call(self._waiting.popleft())

    def counts_effect(self) -> bool:
        """Before each effect: False if it dies just there."""
        if self.dies_at_effect is not None:
            self.dies_at_effect -= 1
            if self.dies_at_effect < 0 and self.is_alive:
                self.world.tell(f"{self.name} dies in the middle of its effects")
                self.die()
        return self.is_alive

    def die(self, *, silently: bool = False) -> None:
        """It is killed. ``silently``: with its machine, so that the ends of its connections aren't heard."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.host.processes.remove(self)
        for link in list(self.links):
            link.close(self, silently=silently)
        self.died()

    def died(self) -> None:
        """For what follows."""

    def received(self, link: Link, message: Any) -> None:
        """A message came."""

    def link_broke(self, link: Link, *, silent: bool = False, reset: bool = False) -> None:
        """A connection ended. ``silent``: no end of it came, only nothing any more; ``reset``: it wasn't closed."""


class Link:
    """A connection of two processes, as TCP has it: in order in each direction, as long as both ends are there.

    What is lost is sent again, and what was sent after it waits for it.
    """

    def __init__(self, world: World, a: Process, b: Process) -> None:
        self.world = world
        self.number = world.next_number()
        self.ends: list[Process | None] = [a, b]
        self._hosts = (a.host, b.host)
        self._free_s = [0.0, 0.0]
        """When the last message from each side arrives."""
        self._lost_s = [0.0, 0.0]
        """The same of the last one of which a packet was lost."""
        self._held: list[deque[Any]] = [deque(), deque()]
        self._silent_s: float | None = None
        """Since when no packet has got through; None if they do."""
        self._closed: set[Process] = set()
        """Processes that have closed their end, and read nothing more from it."""
        for end in (a, b):
            end.links.append(self)
        world.links.append(self)

    def send(self, sender: Process, message: Any) -> None:
        """``None`` is the end of it."""
        if sender not in self.ends:
            return  # it is broken, and the sender has yet to hear of it
        side = self.ends.index(sender)
        world = self.world
        again_s = world.again_s(*self._hosts)
        if again_s > _USER_TIMEOUT_S and world.reports_silence and message is not None:
            world.after(_USER_TIMEOUT_S, lambda: self._gives_up(side, sender))
        at_s = max(self._free_s[side], world.now_s + again_s + world.delay_s())
        self._free_s[side] = at_s
        self._lost_s[side] = at_s if again_s else self._lost_s[side]
        world.at(at_s, lambda: self._arrive(side, message))  # not after a difference, whose rounding swaps messages

    def close(self, closer: Process, *, silently: bool = False, resets: bool = False) -> None:
        """One end is closed; the other one hears of it, unless ``silently``, as of a reset where it ``resets``."""
        self._closed.add(closer)
        if closer not in self.ends:
            return
        side = self.ends.index(closer)
        if not silently:
            self.send(closer, _RESET if resets else None)
        self.ends[side] = None
        closer.links.remove(self)
        if self.ends == [None, None]:
            self.world.links.remove(self)

    def reset(self) -> None:
        """Something on the way ends it for both."""
        for process in list(self.ends):
            if process is not None and process in self.ends:  # else it has closed it for the other one's sake
                self._break(process, reset=True)

    def retry(self) -> None:
        """What couldn't get through may now."""
        if not self._is_silent():
            self._silent_s = None
        for side in (0, 1):
            held = self._held[side]
            while held and not self._is_held(side):
                self._arrive(side, held.popleft())

    def falls_silent(self) -> None:
        """If nothing gets through any more, the kernels say so after a while."""
        if self._silent_s is not None or not self.world.reports_silence or not self._is_silent():
            return
        since_s = self._silent_s = self.world.now_s
        for side in (0, 1):
            within_s = self.world.chance.uniform(*_SILENCE_S)
            self.world.after(within_s, partial(self._times_out, side, since_s))

    def _is_silent(self) -> bool:
        return self.world.is_cut(*self._hosts) or any(host.is_frozen for host in self._hosts)

    def _is_held(self, side: int) -> bool:
        """Whether nothing gets through from that side."""
        target = self._hosts[1 - side]
        return self.world.blocks(self._hosts[side], target) or (self.world.reports_silence and target.is_frozen)

    def _gives_up(self, side: int, sender: Process) -> None:
        """The sender's kernel has had no answer for too long."""
        if self.ends[side] is sender and not sender.host.is_frozen:
            self.world.tell(f"{sender.name} gets no answer any more on {self.number}")
            self._break(sender, silent=True)

    def _times_out(self, side: int, since_s: float) -> None:
        process = self.ends[side]
        if process is not None and self._silent_s == since_s and not process.host.is_frozen:
            self._held[side].clear()
            self.world.tell(f"{process.name} hears nothing any more on {self.number}")
            self._break(process, silent=True)

    def _arrive(self, side: int, message: Any) -> None:
        if self._is_held(side):
            self._held[side].append(message)
            return
        target = self.ends[1 - side]
        if target is None:
            sender = self.ends[side]
            if sender is not None and message is not None and message is not _RESET:
                self.world.at(self._reset_s(1 - side), lambda: self._refused(side))
            return
        if message is None or message is _RESET:
            self._break(target, reset=message is _RESET)
        else:
            target.call(lambda: self._deliver(side, target, message))

    def _deliver(self, side: int, target: Process, message: Any) -> None:
        now = self.ends[1 - side]
        if now is target or (now is None and target not in self._closed):  # what came before its end is read
            target.received(self, message)
        elif now is not None:  # another process has taken the connection meanwhile
            now.call(lambda: self._deliver(side, now, message))

    def _reset_s(self, side: int) -> float:
        """Return when a reset sent from that side now arrives: after its end, unless a packet of that is lost."""
        at_s = self.world.now_s + self.world.delay_s()
        return at_s if self._lost_s[side] > self.world.now_s else max(at_s, self._free_s[side])

    def _refused(self, side: int) -> None:
        """The other host has no such connection any more, or no process that reads from it: it answers with a reset."""
        sender = self.ends[side]
        if sender is not None and not self.world.is_cut(*self._hosts):
            self._break(sender, reset=True)

    def _break(self, process: Process, *, silent: bool = False, reset: bool = False) -> None:
        side = self.ends.index(process)
        self.ends[side] = None
        process.links.remove(self)
        if self.ends == [None, None] and self in self.world.links:
            self.world.links.remove(self)
        process.call(lambda: process.link_broke(self, silent=silent, reset=reset))
