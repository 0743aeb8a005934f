"""Choice of the nodes that take part in the next cycle, and of their places. Pure.

With ``--ft-segment`` nodes train in groups that share an NVLink domain. A *segment* is ``size`` nodes of one domain
with places that follow each other. Only whole segments train; nodes that make none are spares, of use to their own
domain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from megatron_ft.job.rules.nodes import Node
from megatron_ft.link.base.hosts import natural

Segment = list[Node]


def _in_order(nodes: Iterable[Node], *, is_first: bool) -> list[Node]:
    """Return nodes in the order in which they get places: in the first cycle of a job, or as new ones of a later one.

    At first those without a rank follow by their names; the coordinator's host is the first, because scripts take it
    for node 0.
    """

    def order(node: Node) -> tuple[Any, ...]:
        by_name = (not node.hello.owns, natural(node.name)) if is_first else ()
        return node.hello.rank is None, node.hello.rank or 0, *by_name, node.arrived

    return sorted(nodes, key=order)


def choose(
    slots: Sequence[Node],
    ready: Iterable[Node],
    max_nodes: int,
    size: int = 0,
    *,
    bad: Collection[str] = (),
    named: str = "",
) -> tuple[list[Node], list[Node]]:
    """Choose the nodes of the next cycle; return them by place, and the slots after that: none before the first cycle.

    The first cycle goes by the ranks that were given; else the node that hosts the leader is the first, and the others
    follow by their names. Later a segment keeps its places as long as its domain can fill it: the nodes that are left
    keep theirs, one that comes back gets its own, and spares of the domain take the others', segments that lack the
    fewest first. The nodes of segments that can't be filled, and spares, make new segments in the places of lost ones.

    Of ``bad`` nodes (instances) that had no place no more take part than are needed. One that has just been ``named``
    again is replaced by a spare of its domain that isn't bad, else its segment by a whole one of such spares.
    """
    nodes, size = _in_order(ready, is_first=not slots), size or 1  # without segments a node is one by itself
    most = min(max_nodes, usable(nodes, size)) // size
    nodes = _wanted(nodes, slots, most, size, bad=bad, named=named)
    free = {node.instance: node for node in nodes}
    slots = _with_returned(slots, free)
    parts = [slots[at : at + size] for at in range(0, len(slots), size)]
    survivors = [_survivors(part, free) for part in parts]
    kept = {node.instance for left in survivors for node in left if node is not None}
    spares = [node for node in nodes if node.instance not in kept]
    segments: list[Segment | None] = [None] * len(parts)
    chosen = 0
    for at, left in sorted(enumerate(survivors), key=lambda each: each[1].count(None)):
        segment = _filled(left, spares) if chosen < most else None
        for node in segment or ():
            del free[node.instance]
        segments[at], chosen = segment, chosen + (segment is not None)
    new = iter(_new_segments(free.values(), size)[: most - chosen])
    segments = [next(new, None) if segment is None else segment for segment in segments]
    further = [node for segment in new for node in segment]
    # places whose nodes are all lost are kept for those that come back
    after = [
        node
        for segment, part, left in zip(segments, parts, survivors, strict=True)
        for node in segment or ([] if any(left) else part)
    ]
    return [*(node for segment in segments for node in segment or ()), *further], [*after, *further]


def rotated_slots(slots: Sequence[Node], chosen: Sequence[Node]) -> list[Node]:
    """The slots with the ``chosen`` nodes, which have changed places with each other, in their new order."""
    mine, order = {node.instance for node in chosen}, iter(chosen)
    return [next(order) if slot.instance in mine else slot for slot in slots]


def usable(ready: Collection[Node], size: int) -> int:
    """Return the number of these nodes in whole segments of that ``size``; 0: all of them."""
    if not size:
        return len(ready)
    return sum(count - count % size for count in Counter(node.hello.domain for node in ready).values())


def _with_returned(slots: Sequence[Node], here: dict[str, Node]) -> list[Node]:
    """The slots with new launchers in those of lost ones of their domain, of the same rank or, without one, host."""
    lost: dict[tuple[str, int | str | None], list[int]] = {}
    for index, slot in reversed([*enumerate(slots)]):
        if slot.instance not in here:
            own_name = slot.name if slot.hello.rank is None else slot.hello.rank
            lost.setdefault((slot.hello.domain, own_name), []).append(index)
    seated, found = {slot.instance for slot in slots}, [*slots]
    for node in here.values():
        domain = node.hello.domain
        own = lost.get((domain, node.hello.rank)) or lost.get((domain, node.name))
        if node.instance not in seated and own:
            found[own.pop()] = node
    return found


def _wanted(
    nodes: Sequence[Node], slots: Sequence[Node], most: int, size: int, *, bad: Collection[str], named: str
) -> list[Node]:
    """These nodes without the bad ones that ``most`` segments don't need.

    Those of a segment that is whole stay, but for one that was just named.
    """
    here, wanted = {node.instance for node in nodes}, [*nodes]
    parts = [{slot.instance for slot in slots[at : at + size]} for at in range(0, len(slots), size)]
    seated = set[str]().union(*(part for part in parts if part <= here)) - {named}
    had_places = {slot.hello.domain for slot in slots}
    doubtful = [node for node in nodes if node.instance in bad and node.instance not in seated]
    for node in sorted(doubtful, key=lambda each: (each.instance == named, each.hello.domain in had_places)):
        others = [each for each in wanted if each is not node]
        if usable(others, size) >= most * size:
            wanted = others
    return wanted


def _survivors(slots: Sequence[Node], ready: dict[str, Node]) -> list[Node | None]:
    """The nodes left of a segment, by place; without those of another domain, which a new coordinator may not know."""
    left = [ready.get(slot.instance) for slot in slots]
    domain = next((node.hello.domain for node in left if node is not None), None)
    return [node if node is not None and node.hello.domain == domain else None for node in left]


def _filled(left: Sequence[Node | None], spares: list[Node]) -> Segment | None:
    """The segment filled with spares of its domain, which are taken; None if there are too few, or no node is left."""
    if None not in left:
        return [node for node in left if node is not None]
    domain = next((node.hello.domain for node in left if node is not None), None)
    fit = [node for node in spares if node.hello.domain == domain]
    if domain is None or len(fit) < left.count(None):
        return None
    taken = iter(fit)
    segment = [next(taken) if node is None else node for node in left]
    spares[:] = [node for node in spares if node not in segment]
    return segment


def _new_segments(nodes: Iterable[Node], size: int) -> list[Segment]:
    """Segments of one domain each, nodes in their order."""
    by_domain: dict[str, Segment] = {}
    for node in nodes:
        by_domain.setdefault(node.hello.domain, []).append(node)
    return [domain[at : at + size] for domain in by_domain.values() for at in range(0, len(domain) - size + 1, size)]
