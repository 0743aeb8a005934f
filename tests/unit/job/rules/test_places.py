"""Who has which place in the next cycle, whatever came before: drawn jobs, each of a few rounds."""

from __future__ import annotations

import random

import pytest

from megatron_ft.job.rules.nodes import Node
from megatron_ft.job.rules.places import choose
from tests.support.job_machines import node


class Drawn:
    """Nodes of a job that come and go."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.has_ranks = self.chance.random() < 0.5
        self.count = 0
        self.ready = [self.node() for _ in range(self.chance.randint(1, 8))]

    def node(self) -> Node:
        """A fresh launcher, perhaps on a host that had one."""
        self.count += 1
        host, domain = self.chance.randrange(6), self.chance.choice("xyz")
        rank = host if self.has_ranks else None
        return node(f"i{self.count}", f"h{host}", rank=rank, arrived=self.count, domain=domain)

    def come_and_go(self) -> None:
        """At least one is left."""
        left = [node for node in self.ready if self.chance.random() < 0.75]
        self.ready = [*left, *(self.node() for _ in range(self.chance.randint(0 if left else 1, 3)))]


@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_ready_nodes_all_take_part_and_keep_their_places(first: int) -> None:
    for seed in range(first, first + 500):
        job, slots = Drawn(seed), list[Node]()
        most = job.chance.randint(1, 5)
        for _ in range(4):
            words = [node.instance for node in job.ready]
            bad = {word for word in words if job.chance.random() < 0.3}
            named = job.chance.choice([*words, ""])
            seated = [slot.instance for slot in slots if slot.instance in words]
            nodes, slots = choose(slots, job.ready, most, bad=bad, named=named)
            chosen = [node.instance for node in nodes]
            good_spares = {*words} - bad - {*chosen}
            assert len({*chosen}) == len(chosen) == min(most, len(words)), seed
            # in the same order, and all but a bad one that has just failed again
            assert [word for word in chosen if word in seated] == [word for word in seated if word in chosen], seed
            assert {*seated} - {*chosen} <= {named} & bad, seed
            assert not (good_spares and ({*chosen} & bad) - {*seated}), seed
            assert not (good_spares and named in {*chosen} & bad), seed
            assert [slot.instance for slot in slots if slot.instance in chosen] == chosen, seed
            job.come_and_go()


def test_launcher_that_is_back_gets_its_place_though_a_new_leader_knows_only_the_names_of_lost_ones() -> None:
    slots, back, stays = (
        [node("x", "h0"), node("y", "h1"), node("z", "h2")],
        node("i2", "h2", rank=2),
        node("y", "h1", rank=1),
    )
    spare = node("s", "h3", rank=3)
    chosen, _ = choose(slots, [back, stays, spare], 3)
    assert [each.name for each in chosen] == ["h3", "h1", "h2"]
