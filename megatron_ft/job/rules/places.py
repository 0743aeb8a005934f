"""Choice of the nodes that take part in the next cycle, and of their places. Pure.

With ``--ft-segment`` nodes train in groups that share an NVLink domain. A *segment* is ``size`` nodes of one domain
with places that follow each other. Only whole segments train; nodes that make none are spares, of use to their own
domain. Without the option each node is a segment by itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from megatron_ft.job.rules.nodes import Node
from megatron_ft.link.base.hosts import natural


def usable(ready: Collection[Node], size: int) -> int:
    """Return the number of these nodes in whole segments of that ``size``; 0: all of them."""
    if not size:
        return len(ready)
    return sum(count - count % size for count in Counter(node.hello.domain for node in ready).values())


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

    A domain keeps as many of its segments as it can fill, those that lack the fewest nodes first. Their nodes keep
    their places, one that comes back gets its own, and other nodes of the domain fill the gaps. Nodes that are left
    make new segments, in the places of lost ones.

    Of ``bad`` nodes (instances) without a place no more take part than are needed, nor of the one that was ``named``
    for a failure again, which is the last to be left out.
    """
    nodes, size = sorted(ready, key=in_order), size or 1
    most = min(max_nodes, usable(nodes, size)) // size
    seated, had_places = {slot.instance for slot in slots} - {named}, {slot.hello.domain for slot in slots}
    doubtful = [node for node in nodes if node.instance in bad and node.instance not in seated]
    for node in sorted(doubtful, key=lambda each: (each.instance == named, each.hello.domain in had_places)):
        others = [each for each in nodes if each is not node]
        if usable(others, size) >= most * size:
            nodes = others

    here = {node.instance: node for node in nodes}
    slots = _with_returned(slots, here)
    parts = [slots[at : at + size] for at in range(0, len(slots), size)]
    left = [[here.get(slot.instance) for slot in part] for part in parts]
    count, kept = Counter(node.hello.domain for node in nodes), dict[int, str]()
    for at in sorted(range(len(parts)), key=lambda at: left[at].count(None)):
        domain = next((node.hello.domain for node in left[at] if node is not None), None)
        if domain is None:
            continue  # all are lost: the places are kept for those that come back
        if len(kept) < most and count[domain] >= size:
            kept[at] = domain
            count[domain] -= size
        else:
            parts[at], left[at] = [], [None] * size
    new = iter([domain for domain in count for _ in range(count[domain] // size)][: most - len(kept)])
    stay, spares = {node for at in kept for node in left[at]}, defaultdict[str, deque[Node]](deque)
    for node in nodes:
        if node not in stay:
            spares[node.hello.domain].append(node)

    parts += ([] for _ in range(most))
    left += ([None] * size for _ in range(most))
    chosen, after = list[Node](), list[Node]()
    for at, part in enumerate(parts):
        domain = kept[at] if at in kept else next(new, None)
        segment = [] if domain is None else [node or spares[domain].popleft() for node in left[at]]
        chosen += segment
        after += segment or part
    return chosen, after


def in_order(node: Node) -> tuple[Any, ...]:
    """By rank, if one was given, else by name: the leader's host is the first, because scripts take it for node 0."""
    return node.hello.rank is None, node.hello.rank or 0, not node.hello.owns, natural(node.name), node.arrived


def _with_returned(slots: Sequence[Node], here: dict[str, Node]) -> list[Node]:
    """The slots with new launchers in those of lost ones of their domain and rank, or of their host without a rank."""

    def own(node: Node) -> tuple[str, int | str]:
        return node.hello.domain, node.name if node.hello.rank is None else node.hello.rank

    lost = {own(slot): at for at, slot in enumerate(slots) if slot.instance not in here}
    seated, found = {slot.instance for slot in slots}, [*slots]
    for node in here.values():
        if (
            node.instance not in seated
            and (at := lost.pop(own(node), lost.get((node.hello.domain, node.name)))) is not None
        ):
            found[at] = node
    return found
