"""Who is connected to the coordinator, and who is to have which place in the next cycle. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_ft.core.hosts import natural
from megatron_ft.core.job.messages import Hello, Phase, Standing
from megatron_ft.core.job.progress import Advance
from megatron_ft.core.job.roll import Beside, Decision, Held, Memory

__all__ = ["GRACE_S", "Node", "Slot", "beat_s", "choose", "in_order", "lost_s", "names_of"]

GRACE_S = 0.3
"""A launcher whose connection has ended is dead, or back within this time."""
_MOST_NAMES = 100


def beat_s(nodes: int) -> float:
    """Between two `Beat`s of a launcher, in a job of so many nodes."""
    return min(5.0, max(1.0, nodes / 2000))


def lost_s(nodes: int) -> float:
    """Who is silent for so long is gone; the kernel may notice sooner that no packet is answered any more."""
    return 3 * beat_s(nodes) + 3.0


@dataclass(slots=True, eq=False)
class Node:
    """One launcher, connected or missing for a moment only. Times are those of the coordinator's own clock."""

    instance: str
    name: str
    address: str
    rank: int | None
    owns: bool
    arrived: int
    link: int | None = None
    session: int = -1
    heard_s: float = 0.0
    gone_s: float = 0.0
    silent: bool = False
    follows: bool = False
    phase: Phase = Phase.BUSY
    before: Advance = Advance()  # noqa: RUF009 - frozen
    """Of earlier lives of the job."""
    bad: str = ""
    """Why earlier lives of the job would rather have done without this host."""
    memory: Memory = field(default_factory=Memory)
    standing: Standing = field(default_factory=Standing)
    domain: str = ""
    """Of NVLink, where that matters."""
    place: int | None = None
    """In the last decision."""
    votes: bool = False
    found_silent: Beside | None = None
    """As it says in its `Hello`."""

    @staticmethod
    def of(hello: Hello, arrived: int) -> Node:
        """A launcher that says hello for the first time."""
        return Node(
            hello.instance,
            hello.name,
            hello.address,
            hello.rank,
            hello.owns,
            arrived,
            before=hello.before,
            domain=hello.domain,
            bad=hello.bad,
        )

    def awaited_until_s(self, *, silence_s: float, slept_s: float) -> float:
        """Its connection has ended: it is dead, or back by then.

        If the coordinator has just stood still (``slept_s``), it may have looked for another one meanwhile.
        """
        if self.silent:
            return self.gone_s
        return self.gone_s + (silence_s if self.gone_s <= slept_s + GRACE_S else GRACE_S)

    def held(self, decision: Decision) -> Held | None:
        """That decision as this node has it, if it has heard of it."""
        return self.memory.held(decision)


@dataclass(frozen=True, slots=True)
class Slot:
    """Who has or last had a place, in the order of places; a place that nobody has is kept for who comes back."""

    instance: str
    name: str
    rank: int | None = None

    @staticmethod
    def of(node: Node) -> Slot:
        """That node's."""
        return Slot(node.instance, node.name, node.rank)


def names_of(members: Mapping[int, Node]) -> tuple[str, ...]:
    """The names of their hosts, by place; none of many, which would make every message long."""
    return tuple(members[place].name for place in sorted(members)) if len(members) <= _MOST_NAMES else ()


def in_order(nodes: Iterable[Node], *, is_first: bool) -> list[Node]:
    """As they are to have places: in the first cycle of a job, or as far as they are new to a later one."""
    return sorted(nodes, key=_first_order if is_first else _later_order)


def choose(
    slots: Sequence[Slot], ready: Iterable[Node], max_nodes: int, *, bad: Collection[str] = (), named: str = ""
) -> tuple[list[Node], list[Slot]]:
    """Who takes part, by place, and the slots after that.

    At first by the ranks that were given; else the node that hosts the coordinator is the first, and the others follow
    by their names. Later who had a place keeps it, or comes after the same ones as before; who comes back gets its own;
    spares fill gaps. Of ``bad`` nodes (words of launchers) no more take part than are needed; one that has just been
    ``named`` again makes place for a spare that isn't bad, if there is one that no other place needs.
    """
    nodes = in_order(ready, is_first=not slots)
    if not slots:
        first = sorted(nodes, key=lambda node: node.instance in bad)[:max_nodes]
        chosen = in_order(first, is_first=True)
        return chosen, [*map(Slot.of, chosen)]
    free = {node.instance: node for node in nodes}
    filled: list[Node | None] = [free.pop(slot.instance, None) for slot in slots]
    room = max_nodes - sum(node is not None for node in filled)
    groups = [{i: node for i, node in free.items() if (i in bad) is is_bad} for is_bad in (False, True)]
    if named in bad and len(groups[0]) > room:
        filled = [None if node is not None and node.instance == named else node for node in filled]
        room = max_nodes - sum(node is not None for node in filled)
    more: list[Node] = []
    for group in groups:
        room = _fill(slots, filled, group, room)
        more += group.values()
    chosen = [node for node in filled if node is not None]
    more = more[: max(0, room)]
    kept = [slot if node is None else Slot.of(node) for slot, node in zip(slots, filled, strict=True)]
    return [*chosen, *more], [*kept, *map(Slot.of, more)][-2 * max_nodes :]


def _fill(slots: Sequence[Slot], filled: list[Node | None], free: dict[str, Node], room: int) -> int:
    """Give gaps to these: first to those that come back, then to any. How many more may take part."""
    returning: dict[int | str | None, list[Node]] = {}
    for each in reversed(free.values()):
        returning.setdefault(each.rank, []).append(each)
        returning.setdefault(each.name, []).append(each)
    for returns in (True, False):
        for index, slot in enumerate(slots):
            if filled[index] is not None or room <= 0 or not free:
                continue
            node = _returned(slot, returning, free) if returns else _first(free)
            if node is not None:
                filled[index] = free.pop(node.instance)
                room -= 1
    return room


def _returned(slot: Slot, returning: Mapping[int | str | None, list[Node]], free: Mapping[str, Node]) -> Node | None:
    """The first that has come in the stead of the one that had the place, by its rank, or host if it has none."""
    nodes = returning.get(slot.name if slot.rank is None else slot.rank, [])
    while nodes:
        if (node := nodes.pop()).instance in free:
            return node
    return None


def _first(nodes: dict[str, Node]) -> Node:
    return next(iter(nodes.values()))


def _first_order(node: Node) -> tuple[bool, int, bool, tuple[tuple[str, int], ...], int]:
    """As the user or the scheduler says, else by name, but for the host: scripts take it for node 0."""
    return node.rank is None, node.rank or 0, not node.owns, natural(node.name), node.arrived


def _later_order(node: Node) -> tuple[bool, int, int]:
    return node.rank is None, node.rank or 0, node.arrived
