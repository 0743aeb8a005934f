"""The control plane in simulated jobs: the properties hold, and each is broken by a bug that is planted for it."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_ft.job.etcd_leader import LeaderInEtcd, LeaderOver
from megatron_ft.job.rules import job_cycle, job_lines, member, next_cycle
from megatron_ft.job.rules.coordinator import Coordinator
from megatron_ft.job.rules.faults import fault_of
from megatron_ft.job.rules.job_cycle import JobCycle
from megatron_ft.job.rules.member import Member
from megatron_ft.job.rules.messages import Dismiss, Tell
from megatron_ft.job.rules.next_cycle import RoundCompletion
from megatron_ft.job.rules.nodes import Node
from megatron_ft.job.rules.restart_policy import Action, Outcome, Rules
from megatron_ft.job.rules.rotation import Rotation
from megatron_ft.launcher.rules.turn import JobLinePrinter
from tests.simulation.mutants import misplaced
from tests.simulation.plan import Fault, plain_plan_of, plan_of
from tests.simulation.run import shrunk
from tests.simulation.simulate import Run, simulate
from tests.simulation.world import Link, Process, World

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


@pytest.mark.parametrize("kind", ["host_off", "host_cut", "host_frozen"])
def test_kernels_report_silence(kind: str) -> None:
    """If they notice it before the machines: on both sides of a cut, and that a host is off, or suspended."""
    fault = Fault(at_s=6.0, kind=kind, which=2, seconds=20.0)
    runs = [run_of(seed, fault, work_s=30.0, reports_silence=reports) for reports in (False, True) for seed in range(6)]
    silent = [[float(line.split()[0]) for line in run.story if "hears nothing any more" in line] for run in runs]
    assert not any(silent[:6])
    assert any(silent[6:])
    assert all(10.0 <= at_s <= 12.0 for times in silent for at_s in times)


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


class End(Process):
    """One end of a connection, and what it got."""

    def __init__(self, host: Any) -> None:
        super().__init__(host, "")
        self.got: list[int | str] = []

    def received(self, link: Link, message: int) -> None:
        self.got.append(message)

    def link_broke(self, link: Link, *, silent: bool = False, reset: bool = False) -> None:
        self.got.append("end")


def test_messages_arrive_in_order_before_the_end_also_where_packets_are_lost_and_nothing_once_closed() -> None:
    world = World(random.Random(1), 2)
    sender, receiver = map(End, world.hosts)
    link = Link(world, sender, receiver)
    world.loss = 0.3
    for number in range(200):
        world.at(0.01 * number, partial(link.send, sender, number))
    world.at(1.0, lambda: receiver.freeze(5.0))
    world.at(2.5, lambda: link.close(sender))
    world.run(60.0, lambda: False)
    assert receiver.got == [*range(200), "end"]
    closed = Link(world, sender, receiver)
    receiver.freeze(5.0)
    receiver.call(lambda: closed.close(receiver))
    closed.send(sender, 1)
    world.run(90.0, lambda: False)
    assert receiver.got[-1] == "end"


def test_every_mutant_of_the_campaign_still_has_its_text() -> None:
    assert misplaced() == []


def test_the_same_seed_is_the_same_run() -> None:
    one, other = (simulate(plan_of(11), tell=True) for _ in range(2))
    assert one.story == other.story
    assert one.events == other.events


def _sets(*patches: tuple[Any, str, Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a bug: attributes that have these values."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        for patch in patches:
            monkeypatch.setattr(*patch)

    return plant


def _wraps(owner: Any, name: str, wrapped: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a bug: the function of this name is called by another one, which gets it first."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **more: wrapped(real, *args, **more))

    return plant


def _given_up(judge: Any, *args: Any, **more: Any) -> Any:
    verdict = judge(*args, **more)
    if verdict.decision.action is not Action.RESTART:
        return verdict
    return replace(verdict, decision=replace(verdict.decision, action=Action.GIVE_UP))


def _nobody(judge: Any, *args: Any, **more: Any) -> Any:
    verdict = judge(*args, **more)
    return replace(verdict, node=None, cause=replace(verdict.cause, text=job_lines.UNKNOWN_FAILURE))


def _shuffled(choose: Any, slots: Any, *args: Any, **more: Any) -> Any:
    nodes, after = choose(slots, *args, **more)
    return nodes[::-1] if slots else nodes, after


def _joins_at_once(conclude: Any, self: Coordinator) -> None:
    self.rules, rules = replace(self.rules, at_once=True), self.rules
    conclude(self)
    self.rules = rules


def _forgets(bring_up_to_date: Any, self: Coordinator, node: Node) -> None:
    node.standing = replace(node.standing, shutdown="")
    bring_up_to_date(self, node)


def _one_too_few(update: Any, self: Any, rules: Any, *, ready: int, **more: Any) -> bool:
    return bool(update(self, rules, ready=ready + (0 < ready == rules.min_nodes - 1), **more))


def _left(leave: Any, self: Member, code: int, text: str, **more: Any) -> None:
    leave(self, code + int(self.identity.instance[1:]) % 2, text, **more)


def _stays(stay: Any, self: Member) -> None:
    stay(self)
    self._leave(0, "")


def _impatient(answered: Any, self: LeaderInEtcd, *args: Any) -> Any:
    effects = answered(self, *args)
    if self.problem:
        raise LeaderOver(Dismiss(94, ""))
    return effects


def _later_given_up(decide: Any, self: Rules, *args: Any, **more: Any) -> Any:
    return decide(replace(self, max_stalled=self.max_stalled and self.max_stalled + 1), *args, **more)


_WITHOUT_RECORD = _wraps(Coordinator, "__init__", lambda made, *args, record=None, **more: made(*args, **more))
_CODES = _wraps(Member, "_leave", _left)
BUGS = {
    "no_two_cycles": _sets((member, "CUT_OFF_S", 500.0), (member, "STALLED_S", 500.0)),
    "it_ends": _sets((JobCycle, "judge", lambda *_, **__: None)),
    "stays": _wraps(Member, "_stay", _stays),
    "has_its_size": _wraps(RoundCompletion, "update", _one_too_few),
    "begins_by_a_decision": _sets((LeaderInEtcd, "admit", lambda _self, effects: effects)),
    "one_decision": _WITHOUT_RECORD,
    "nobody_left_out": _wraps(next_cycle, "choose", _shuffled),
    "counted_once": _sets((JobCycle, "restarts_used", property(lambda self: self.decision.restarts))),
    "causes": _wraps(job_cycle, "verdict_on", _nobody),
    "in_time": _sets((JobCycle, "excused_s", lambda *_: 60.0)),
    "codes": _CODES,
    "is_said": _sets(
        (JobLinePrinter, "for_all", lambda _self, text, ends_cycle=False: [] if ends_cycle else [Tell(text)])
    ),
    "is_due": _wraps(job_cycle, "verdict_on", _given_up),
    "reruns_elsewhere": _sets((next_cycle, "rotated_within", lambda chosen, _segment: chosen)),
    "ends_for_a_reason": _wraps(Coordinator, "_conclude", _joins_at_once),
    "shuts_down": _wraps(Coordinator, "_bring_up_to_date", _forgets),
    "notices_no_progress": _wraps(Rules, "decide", _later_given_up),
    "survives_etcd": _wraps(LeaderInEtcd, "answered", _impatient),
}
"""A bug by the property that it breaks."""
FIRST = {"in_time": 70, "reruns_elsewhere": 160, "survives_etcd": 120, "stays": 85, "shuts_down": 50}
"""Seeds with which the search begins; it may as well begin with any other."""


def _seeds_until_broken(word: str, at_most: int) -> Run:
    for seed in itertools.islice(itertools.count(FIRST.get(word, 0)), at_most):
        run = simulate(plan_of(seed))
        if any(line.startswith(word) for line in run.broken):
            return run
    raise AssertionError(f"{at_most} runs, and {word} held")


@pytest.mark.parametrize("word", BUGS)
def test_property_is_broken_by_a_planted_bug(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    BUGS[word](monkeypatch)
    run = _seeds_until_broken(word, 200)
    monkeypatch.undo()
    assert simulate(run.plan).broken == []


def test_a_seed_that_breaks_something_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    _CODES(monkeypatch)
    run = _seeds_until_broken("codes", 50)
    assert len(shrunk(run.plan)) >= len(run.plan.faults) - 1  # one fault is enough for that one
