"""The control plane in simulated jobs: the properties hold. Bugs that break them: `tests/simulation/mutants.py`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_ft.job.rules.faults import fault_of
from megatron_ft.job.rules.restart_policy import Rotation
from tests.simulation.mutants import misplaced
from tests.simulation.plan import Fault, plain_plan_of, plan_of
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
