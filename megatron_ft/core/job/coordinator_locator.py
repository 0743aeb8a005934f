"""Search of a launcher for the coordinator, one address after the other. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_ft.core.wording import listed

_SKIPS_S = (2.0, 4.0, 8.0)
"""How long an address isn't tried after it was silent once, twice, and more often."""
LONGEST_SKIP_S = _SKIPS_S[-1]


_MOST_TOLD = 16
NO_ANSWER = "no answer, from it or from a name server"


class CoordinatorLocator:
    """One per launcher; ``own`` is its own address. Times are seconds of its clock.

    ``address``: the one being tried, or where the coordinator was found; ``home``: where the job was coordinated last.
    """

    def __init__(self, endpoints: tuple[str, ...], *, own: str) -> None:
        self.address = ""
        self.home = endpoints[0]
        self.is_first = True
        """True while no address has answered in this pass."""
        self._endpoints = endpoints
        self._own = own
        self._addresses = endpoints
        self._queue: list[str] = []
        """Addresses that are to be tried next."""
        self._silent: dict[str, tuple[float, int]] = {}
        """Addresses that didn't answer: until when that is held against them, and how often it was so."""
        self._tried_s: dict[str, float] = {}
        """Time before which news are no reason to try an address again: when a coordinator there was last heard not
        to lead, or, where none has answered, when the last try began."""
        self._problems: dict[str, str] = {}
        """Why no coordinator leads there, of each address when it was tried last."""
        self.is_unowned = True
        """No process was ever reached at the first endpoint, whose name is known."""
        self._is_home_there = False
        """The host at ``home`` has ended the last connection itself."""

    def next(self, *, knows_job: bool, now_s: float) -> str:
        """The address to try now: ``home``, another one, ``home`` again, and so on: in the same order for all.

        The job may still be coordinated at ``home``: a coordinator that was frozen for a while goes on.
        """
        queued = self._worth_trying(now_s)
        begins = not queued  # those that are silent still are tried in the next pass
        if begins:
            self._queue, self.is_first = self._others(knows_job=knows_job), True
            queued = self._worth_trying(now_s) or self._queue
        is_due = (begins or self.address != self.home) and self._is_worth(self.home, now_s)
        self.address = self.home if is_due or not queued else queued[0]
        self._queue = [each for each in self._queue if each != self.address]
        self._tried_s[self.address] = now_s
        return self.address

    def tried(self, now_s: float, *, is_answered: bool, problem: str = "") -> None:
        """The address is given up; ``is_answered``: a coordinator is there, which doesn't lead.

        ``problem``: why, in words, where that is known.
        """
        self.is_first = self.is_first and not is_answered
        if is_answered:
            self._tried_s[self.address] = now_s
        self._problems[self.address] = problem or ("the coordinator there does not lead" if is_answered else NO_ANSWER)

    def reached(self) -> None:
        """Note that a process is at the address that is being tried, or may come to be: its name isn't known yet."""
        self.is_unowned = self.is_unowned and self.address != self._endpoints[0]

    @property
    def problems(self) -> str:
        """Why no coordinator was reached, for the user: the addresses that were tried, and why not each of them."""
        told = [f"{address}: {problem}" for address, problem in self._problems.items()]
        return listed(told, most=_MOST_TOLD, joint="; ") or "still connecting"

    def found_silent(self, now_s: float) -> None:
        """The address that was tried doesn't answer: skip it for a while, or try it once more if its host was there."""
        if self._is_home_there and self.address == self.home:
            self._is_home_there, self._queue = False, []
            return
        times = self._silent.get(self.address, (0.0, 0))[1] + 1
        self._silent[self.address] = now_s + _SKIPS_S[min(times, len(_SKIPS_S)) - 1], times
        if self.address != self.home:
            self._queue.insert(0, self.address)

    def found(self) -> None:
        """The coordinator is where it was looked for."""
        self.home, self._queue, self._is_home_there = self.address, [], False
        self._silent.pop(self.address, None)

    def begin_again(self, *, is_home_there: bool = False) -> None:
        """With the first one: the coordinator may be replaced already, at the same address.

        ``is_home_there``: that host has just ended the connection. If it doesn't answer at once, packets were lost.
        """
        self._queue, self._is_home_there = [], is_home_there

    def told_of(self, address: str, now_s: float, age_s: float = 0.0) -> bool:
        """Another launcher followed a coordinator there ``age_s`` ago; returns whether to try that next.

        What is said may be older than when that address was last tried in vain.
        """
        is_old = address in self._tried_s and now_s - age_s <= self._tried_s[address]
        if is_old or address in ("", self.address):
            return False
        if not self._is_worth(address, now_s):
            del self._silent[address]  # another launcher has reached it since
            others = [each for each in self._queue if each != self.address]
            self._queue = [self.address, *others]  # back here, if in vain
        self._addresses = tuple(dict.fromkeys((*self._addresses, self.home, address)))
        self.home = address
        return True

    def candidates(self, addresses: Iterable[str], *, are_decided: bool = True) -> None:
        """These could coordinate, in this order; after them the endpoints, and those before if nothing is decided."""
        known = self._endpoints if are_decided else self._addresses
        self._addresses = tuple(dict.fromkeys((*addresses, *known)))

    def _others(self, *, knows_job: bool) -> list[str]:
        """All other addresses."""
        # the founder goes back to its own address if no coordinator is where it was sent
        founds = not knows_job and self._own == self._endpoints[0]
        known = (self._own,) if founds else self._addresses
        return [each for each in dict.fromkeys(known) if each not in ("", self.home)]

    def _worth_trying(self, now_s: float) -> list[str]:
        return [each for each in self._queue if self._is_worth(each, now_s)]

    def _is_worth(self, address: str, now_s: float) -> bool:
        return self._silent.get(address, (0.0, 0))[0] <= now_s
