"""The control plane in simulated jobs: the properties hold, and each is broken by a bug that is planted for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_ft.job.rules.faults import fault_of
from megatron_ft.job.rules.restart_policy import Outcome
from megatron_ft.job.rules.rotation import Rotation
from tests.simulation.mutants import MUTANTS, Mutant, misplaced, planted
from tests.simulation.plan import Fault, plain_plan_of, plan_of
from tests.simulation.run import shrunk
from tests.simulation.simulate import Run, simulate

SEEDS = 60


def test_properties_hold_in_simulated_jobs() -> None:
    """`make simulate` runs many more."""
    assert {seed: run.broken for seed in range(SEEDS) if (run := simulate(plan_of(seed))).broken} == {}


def run_of(
    seed: int, *faults: Fault, nodes: int = 4, in_etcd: bool = False, rules: dict[str, Any] | None = None, **more: Any
) -> Run:
    """Simulate a job that meets these faults; no property may be broken."""
    plan = plain_plan_of(seed, nodes=nodes, faults=0, in_etcd=in_etcd)
    given = {"min_nodes": nodes - 1, "min_healthy": False, "max_restarts": 5, "max_stalled": 0, "launchers": 0}
    plan = dataclasses.replace(plan, rules=replace(plan.rules, **{**given, **(rules or {})}), faults=faults)
    run = simulate(dataclasses.replace(plan, **{"spares": 0, "work_s": 20.0, **more}), tell=True)
    assert run.broken == [], seed
    return run


def test_properties_hold_in_a_job_of_a_hundred_nodes() -> None:
    run = simulate(plain_plan_of(7, nodes=100, faults=3))
    assert run.broken == []
    assert max(made.decision.world for made in run.job.made) >= 50


@pytest.mark.parametrize("kind", ["host_off", "coordinator_frozen", "etcd_cut"])
def test_another_launcher_leads_where_the_lock_is_in_etcd_and_one_restart_is_the_most(kind: str) -> None:
    leaders = 0
    for seed in range(8):
        fault = Fault(at_s=9.0, kind=kind, which=seed // 2, seconds=12.0)
        run = run_of(seed % 2, fault, in_etcd=True, rules={"last_call_s": 1.0}, tells_progress=True)
        assert {made.decision.restarts for made in run.job.made} <= {0, 1}
        assert {launcher.code for launcher in run.job.launchers} <= {0, None}
        leaders += len({process.host for process in run.job.coordinators}) > 1
    assert leaders >= 2


@pytest.mark.parametrize("latency_s", [0.0, 0.15])
def test_a_connection_that_is_reset_costs_no_restart_whatever_the_round_trip(latency_s: float) -> None:
    resets = [Fault(at_s=at_s, kind="connection_reset", which=3, seconds=1.0) for at_s in (8.0, 8.02)]
    for seed in range(12):
        run = run_of(seed, *resets, nodes=5, latency_s=latency_s)
        assert {made.decision.restarts for made in run.job.made} == {0}


def test_node_whose_rank_others_have_lost_is_named() -> None:
    causes = []
    for seed in range(1, 8):  # in the job of seed 0 it is the launcher that holds the lock
        fault = Fault(at_s=5.0, kind="dies_last", which=seed, seconds=0.0)
        run = run_of(seed, fault, nodes=5, rules={"last_call_s": 0.5}, work_s=8.0)
        causes += [each.verdict.cause.text for each in run.job.verdicts if each.verdict.outcome is Outcome.FAILED]
    assert len(causes) >= 4  # without those of launchers that hold the lock
    assert all("its launcher exited" in each for each in causes)


@pytest.mark.parametrize("more", [None, "coordinator_killed", "launcher_killed", "rank_fails", "host_off"])
def test_another_node_runs_the_rank_that_asks_for_another_gpu(more: str | None) -> None:
    """Whatever else happens about then, and whether the coordinator lives to see it."""
    moved = 0
    for seed in range(10):
        others = [Fault(at_s=6.0 + 0.15 * (seed % 5), kind=more, which=seed, seconds=30.0)] if more else []
        asks = Fault(at_s=6.0, kind="ranks_rerun", which=seed, seconds=0.0)
        run = run_of(seed, asks, *others, work_s=25.0)
        rotating = [judged.verdict for judged in run.job.verdicts if judged.verdict.rotation is Rotation.NODES]
        moved += bool(rotating)
        for verdict in rotating:
            assert verdict.cycle == 0
            assert fault_of(verdict) is None
            assert any("nodes are rotated by one place; restarting as cycle 1" in text for text in run.job.said)
    assert moved >= (10 if more is None else 5)


@pytest.mark.parametrize("is_healthy_enough", [False, True])
def test_a_concluded_rerun_ends_the_job_with_its_own_code(is_healthy_enough: bool) -> None:
    for seed in range(8):
        fault = Fault(at_s=6.0, kind="rerun_concluded", which=seed, seconds=0.0)
        run = run_of(seed, fault, rules={"min_healthy": is_healthy_enough}, work_s=25.0)
        assert {launcher.code for launcher in run.job.launchers} == {93}
        assert not any(made.decision.cycle > 0 for made in run.job.made)


def test_every_mutant_of_the_campaign_still_has_its_text() -> None:
    assert misplaced() == []


def test_the_same_seed_is_the_same_run() -> None:
    one, other = (simulate(plan_of(11), tell=True) for _ in range(2))
    assert one.story == other.story


SHOWN_BY = {
    "no_two_cycles": ("3 * beat_s(nodes) + 2.5", 3),
    "it_ends": ("self.decided, self.place = decided, decided.place", 0),
    "founds_rightly": ("(last.number + 1, last.founding)", 1),
    "stays": ("self._out.append(m.Stay())", 85),
    "has_its_size": ("ready, rules.max_nodes, rules.segment, bad", 0),
    "begins_by_a_decision": ("members[0].standing.store", 0),
    "one_decision": ("(last.number + 1, last.founding)", 1),
    "nobody_left_out": ("        if awaited:\n            return False\n", 0),
    "counted_once": ("if used > self.max_restarts:", 20),
    "causes": ("has_failed = healthy + succeeded < self.min_nodes", 4),
    "in_time": ('may be silent before it counts as lost."""', 70),
    "codes": ("m.Dismiss(code, text, is_of_all)", 0),
    "is_said": ("        if awaited:\n            return False\n", 9),
    "is_due": ("if used > self.max_restarts:", 11),
    "reruns_elsewhere": ("chosen = rotated_within(chosen, rules.segment)", 160),
    "ends_for_a_reason": ("return None if healthy else", 0),
    "shuts_down": ("if node.standing.shutdown:", 50),
    "notices_no_progress": ("is None else cycle.advance,\n            back", 3),
    "survives_etcd": ("if now_s >= self._refused_s + self._rules.join_timeout_s:", 120),
}
"""Text in which mutants are that break a property, and the seed with which the search begins: it may be any other."""


def run_that_breaks(word: str) -> tuple[Mutant, Run]:
    text, first = SHOWN_BY[word]
    for seed in range(first, first + 200):
        for mutant in [each for each in MUTANTS if each.old == text]:
            with planted(mutant):
                run = simulate(plan_of(seed))
            if any(line.startswith(word) for line in run.broken):
                return mutant, run
    raise AssertionError(f"200 runs, and {word} held")


@pytest.mark.parametrize("word", SHOWN_BY)
def test_property_is_broken_by_a_planted_bug(word: str) -> None:
    _, run = run_that_breaks(word)
    assert simulate(run.plan).broken == []


def test_a_seed_that_breaks_something_shrinks() -> None:
    mutant, run = run_that_breaks("codes")
    with planted(mutant):
        assert len(shrunk(run.plan)) >= len(run.plan.faults) - 1  # one fault is enough for that one
