"""Nodes train in whole groups of an NVLink domain, and keep their places as long as their domain can fill them."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from megatron_ft.job.rules.nodes import Node
from megatron_ft.job.rules.places import choose, usable
from megatron_ft.job.rules.restart_policy import Reached
from tests.support import job_machines
from tests.support.machines import Job


def node(name: str, rank: int | None = None) -> Node:
    """In the domain that its first letter names."""
    return job_machines.node(name, f"host-{name}", rank=rank, arrived=int(name[1:]), domain=name[0])


def nodes(text: str) -> list[Node]:
    return [node(name) for name in text.split()]


@pytest.mark.parametrize(
    ("ready", "bad", "named", "takes_part"),
    [
        ("b3 b2 a1 a0", "", "", "a0 a1 b2 b3"),
        ("a0 b2 b3 a7", "", "", "a0 a7 b2 b3"),  # a spare of its domain takes the place
        ("a0 b2 b3 b7", "", "", "b2 b3"),  # none is there
        ("a0 b2 b3 c7 c8", "", "", "c7 c8 b2 b3"),  # another domain has a whole segment for the broken one's places
        ("b2 b3 c7 c8", "", "", "c7 c8 b2 b3"),
        ("d6 d5 c8 c7", "", "", "c7 c8 d5 d6"),  # by their names
        # bad spares take part only if they are needed
        ("a0 b2 b3 a7 a8", "a7", "", "a0 a8 b2 b3"),
        ("a0 b2 b3 a7 c8 c9", "a7", "", "c8 c9 b2 b3"),  # sooner a whole segment of another domain
        ("a0 b2 b3 a7", "a7", "", "a0 a7 b2 b3"),
        ("a0 b2 b3 a7 c8 c9", "a7 c8", "", "a0 a7 b2 b3"),  # of two that hold one the segment that had a place
        ("a0 a1 b2 b3 a7 c8 c9", "a1", "", "a0 a1 b2 b3"),  # who trains isn't disturbed
        # but a bad one that has failed again makes place
        ("a0 a1 b2 b3 a7", "a1", "a1", "a0 a7 b2 b3"),
        ("a0 a1 b2 b3 c8 c9", "a1", "a1", "c8 c9 b2 b3"),
        ("a0 a1 b2 b3 a7", "a1 a7", "a1", "a0 a1 b2 b3"),  # no spare is better
        ("a0 a1 b2 b3 c8", "a1", "a1", "a0 a1 b2 b3"),  # nor of use
        ("a0 a1 b2 b3 a7", "", "a1", "a0 a1 b2 b3"),  # it has failed for the first time
    ],
)
def test_segments_keep_their_places_as_long_as_their_domain_can_fill_them_with_good_nodes(
    ready: str, bad: str, named: str, takes_part: str
) -> None:
    found, _ = choose(nodes("a0 a1 b2 b3"), nodes(ready), 4, 2, bad=frozenset(bad.split()), named=named)
    assert " ".join(each.instance for each in found) == takes_part


def test_segments_are_whole_and_as_many_as_possible_whoever_comes_and_goes() -> None:
    chance = random.Random(5)
    for _ in range(500):
        size, most = chance.choice((1, 2, 3, 4)), chance.randint(4, 20)
        everybody = [node(f"{chance.choice('abcd')}{number}") for number in range(chance.randint(0, 24))]
        before, slots = list[Node](), list[Node]()
        for _ in range(4):
            ready = [each for each in everybody if chance.random() < 0.8]
            found, slots = choose(slots, ready, most, size)
            assert len(found) == min(most, usable(ready, size)) // size * size
            assert len({each.instance for each in found}) == len(found)
            assert {each.instance for each in found} <= {each.instance for each in ready}
            for at in range(0, len(found), size):
                assert len({each.hello.domain for each in found[at : at + size]}) == 1
            if len(ready) == len(everybody) and Counter(map(id, found)) == Counter(map(id, before)):
                assert found == before
            before = found


def test_segments_use_no_bad_node_that_could_be_left_out_without_losing_a_segment() -> None:
    chance = random.Random(7)
    for _ in range(300):
        size, most = chance.choice((1, 2, 3)), chance.randint(2, 9)
        ready = [node(f"{chance.choice('abc')}{number}") for number in range(chance.randint(0, 12))]
        before, _ = choose([], [each for each in ready if chance.random() < 0.7], most, size)
        bad = frozenset(each.instance for each in ready if chance.random() < 0.3)
        named = chance.choice([each.instance for each in before]) if before else ""
        found, _ = choose(before, ready, most, size, bad=bad, named=named)
        assert len(found) == min(most, usable(ready, size)) // size * size
        seated = {each.instance for each in before} - {named}
        sound = [each for each in ready if each.instance not in bad - seated]
        for one in [each for each in found if each.instance in bad - seated]:
            others = [each for each in found if each is not one and each not in sound]
            assert usable([*sound, *others], size) < len(found), f"{one.name} isn't needed"
        for at in range(0, len(found), size):
            assert len({each.hello.domain for each in found[at : at + size]}) == 1


def test_a_job_waits_for_whole_segments_and_replaces_nodes_from_their_own_domain() -> None:
    job = Job(min_nodes=4, max_nodes=4, segment=2, last_call_s=0.2)
    a, b = job.start("ab", domain="left")
    (c,) = job.start("c", domain="right")
    (d,) = job.start("d", domain="left")
    job.run(4.0)
    assert [each.begun for each in (a, b, c, d)] == [None] * 4
    assert a.lines == [
        "waiting for 2 more nodes (4 are here: a, b, c, d; 2 of them not in a complete NVLink-domain segment"
        " (--ft-segment))"
    ]
    (e,) = job.start("e", domain="right")
    job.run(1.0)
    assert [each.place for each in (a, b, c, e)] == [0, 1, 2, 3]
    assert d.begun is None
    b.dies()
    job.run(2.0)
    assert [each.place for each in (a, d, c, e)] == [0, 1, 2, 3]


def test_node_that_fails_again_and_again_is_replaced_from_its_domain() -> None:
    job = Job(min_nodes=2, max_nodes=2, segment=2)
    a, b = job.start("ab", domain="left")
    (spare,) = job.start("c", domain="left")
    for iteration in (10, 20):
        assert [each.place for each in (a, b, spare)] == [0, 1, None]
        b.fails(reached=Reached(0, iteration))
        job.run(2.0)
    assert [each.place for each in (a, b, spare)] == [0, None, 1]
