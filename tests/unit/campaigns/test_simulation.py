"""The control plane in simulated jobs: the properties hold, and each is broken by a bug that is planted for it."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_ft.core.agent.effects import OrderMonitor
from megatron_ft.core.agent.job_line_printer import JobLinePrinter
from megatron_ft.core.agent.last_look import LastLook
from megatron_ft.core.messages.monitor_messages import ConfirmHang
from megatron_ft.job.rules import coordinator, decider, job_cycle, job_lines, member, next_cycle
from megatron_ft.job.rules.actions import Say
from megatron_ft.job.rules.coordinator import Coordinator
from megatron_ft.job.rules.decisions import Decision, DecisionRecord
from megatron_ft.job.rules.faults import fault_of
from megatron_ft.job.rules.job_cycle import JobCycle
from megatron_ft.job.rules.member import Member
from megatron_ft.job.rules.next_cycle import RoundCompletion
from megatron_ft.job.rules.nodes import Node
from megatron_ft.job.rules.restart_policy import Action, Outcome, RestartPolicy
from megatron_ft.job.rules.rotation import Rotation
from tests.simulation.mutants import misplaced
from tests.simulation.plan import Fault, Plan, plain_plan_of, plan_of
from tests.simulation.run import shrunk
from tests.simulation.simulate import Run, simulate
from tests.simulation.world import Link, Process, World

SEEDS = 40


def test_properties_hold_in_simulated_jobs() -> None:
    """`make simulate` runs many more."""
    assert {seed: run.broken for seed in range(SEEDS) if (run := simulate(plan_of(seed))).broken} == {}


@pytest.mark.parametrize("seed", [554, 1332, 5351, 36084])
def test_seed_that_once_broke_a_property_holds(seed: int) -> None:
    """A member died while a decision was made, or a leader with it."""
    plan = plain_plan_of(seed)
    rules = replace(plan.rules, launchers=0, join_timeout_s=90.0)
    assert simulate(dataclasses.replace(plan, rules=rules, reports_silence=False)).broken == []


@pytest.mark.parametrize("seed", [7369, 203898, 303293, 401957])
def test_seed_that_once_lost_a_node_or_named_the_wrong_cause_holds(seed: int) -> None:
    """A launcher dead before a diagnosis; nodes excluded, and unheard; a rank killed while another one hung."""
    assert simulate(plan_of(seed)).broken == []


@pytest.mark.parametrize("kind", ["host_off", "host_cut", "host_frozen"])
def test_kernels_report_silence(kind: str) -> None:
    """If they notice it before the machines: on both sides of a cut, and that a host is off, or suspended."""
    silent = []
    for seed in range(6):
        plan = plain_plan_of(seed, nodes=4, faults=0)
        rules = replace(plan.rules, min_nodes=3, min_healthy=False, max_restarts=3, launchers=0)
        fault = Fault(at_s=6.0, kind=kind, which=2, seconds=20.0)
        plan = dataclasses.replace(plan, rules=rules, work_s=30.0, faults=(fault,), reports_silence=True)
        run = simulate(plan, tell=True)
        assert run.broken == []
        silent += [float(line.split()[0]) for line in run.story if "hears nothing any more" in line]
        without = simulate(dataclasses.replace(plan, reports_silence=False), tell=True)
        assert not [line for line in without.story if "hears nothing any more" in line]
    assert silent
    assert all(10.0 <= at_s <= 12.0 for at_s in silent)


def test_properties_hold_in_a_job_of_a_hundred_nodes() -> None:
    run = simulate(plain_plan_of(7, nodes=100, faults=3))
    assert run.broken == []
    assert max(made.decision.world for made in run.job.made) >= 50


@pytest.mark.parametrize("latency_s", [0.0, 0.15])
def test_a_connection_that_is_reset_costs_no_restart_whatever_the_round_trip(latency_s: float) -> None:
    for seed in range(12):
        plan = plain_plan_of(seed, nodes=5, faults=0)
        resets = tuple(Fault(at_s=at_s, kind="connection_reset", which=3, seconds=1.0) for at_s in (8.0, 8.02))
        plan = dataclasses.replace(plan, spares=0, work_s=12.0, latency_s=latency_s, faults=resets)
        run = simulate(plan)
        assert run.broken == []
        assert {made.decision.restarts for made in run.job.made} == {0}


def test_a_node_whose_packets_are_lost_is_not_taken_for_one_that_exited() -> None:
    for seed in (35, 141, 193, 232):
        plan = plan_of(seed)
        assert simulate(dataclasses.replace(plan, loss=0.3)).broken == []


@pytest.mark.parametrize(
    ("kind", "text"), [("dies_last", "its launcher exited"), ("rank_blocks", "keeps the others waiting")]
)
def test_rank_that_others_have_lost_or_waited_for_is_named(kind: str, text: str) -> None:
    causes = []
    for seed in range(1, 8):  # in the job of seed 0 it is the launcher that holds the lock
        plan = plain_plan_of(seed, nodes=5, faults=0)
        rules = replace(plan.rules, min_healthy=False, max_restarts=3, last_call_s=0.5)
        fault = Fault(at_s=5.0, kind=kind, which=seed, seconds=0.0)
        run = simulate(dataclasses.replace(plan, spares=0, rules=rules, work_s=8.0, faults=(fault,)))
        assert run.broken == [], seed
        causes += [each.verdict.cause.text for each in run.job.verdicts if each.verdict.outcome is Outcome.FAILED]
    assert len(causes) == 7
    assert all(text in each for each in causes)


def _rerun_plan(seed: int, *faults: Fault, nodes: int = 4, **rules: Any) -> Plan:
    plan = plain_plan_of(seed, nodes=nodes, faults=0)
    given = {"min_nodes": nodes - 1, "min_healthy": False, "max_restarts": 5, "max_stalled": 0, "launchers": 0, **rules}
    return dataclasses.replace(plan, rules=replace(plan.rules, **given), spares=0, work_s=25.0, faults=faults)


@pytest.mark.parametrize("more", [None, "coordinator_killed", "launcher_killed", "rank_fails", "host_off"])
def test_another_node_runs_the_rank_that_asks_for_another_gpu(more: str | None) -> None:
    """Whatever else happens about then, and whether the coordinator lives to see it."""
    moved = 0
    for seed in range(14):
        others = [Fault(at_s=6.0 + 0.15 * (seed % 5), kind=more, which=seed, seconds=30.0)] if more else []
        asks = Fault(at_s=6.0, kind="ranks_rerun", which=seed, seconds=0.0)
        run = simulate(_rerun_plan(seed, *sorted([asks, *others], key=lambda fault: fault.at_s)))
        assert run.broken == [], seed
        rotating = [judged.verdict for judged in run.job.verdicts if judged.verdict.rotation is Rotation.NODES]
        moved += bool(rotating)
        for verdict in rotating:
            assert verdict.cycle == 0
            assert fault_of(verdict) is None
            assert any("nodes are rotated by one place; restarting as cycle 1" in text for text in run.job.said)
    assert moved >= (14 if more is None else 5)


@pytest.mark.parametrize("is_healthy_enough", [False, True])
def test_a_concluded_rerun_ends_the_job_with_its_own_code(is_healthy_enough: bool) -> None:
    for seed in range(8):
        fault = Fault(at_s=6.0, kind="rerun_concluded", which=seed, seconds=0.0)
        run = simulate(_rerun_plan(seed, fault, min_healthy=is_healthy_enough))
        assert run.broken == [], seed
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


def connected() -> tuple[World, End, End, Link]:
    world = World(random.Random(1), 2)
    sender, receiver = map(End, world.hosts)
    return world, sender, receiver, Link(world, sender, receiver)


def test_message_sent_after_a_lost_packet_waits_for_it() -> None:
    world, sender, receiver, link = connected()
    world.loss = 0.3
    for number in range(200):
        world.at(0.01 * number, lambda number=number: link.send(sender, number))
    world.run(60.0, lambda: False)
    assert receiver.got == list(range(200))
    assert max(until_s - from_s for from_s, until_s, _ in world.stalls) > 0.5


def test_a_process_that_stood_still_reads_what_came_before_the_end_of_a_connection() -> None:
    world, sender, receiver, link = connected()
    receiver.freeze(5.0)
    link.send(sender, 1)
    world.at(1.0, lambda: link.close(sender))
    world.run(10.0, lambda: False)
    assert receiver.got == [1, "end"]


def test_a_process_that_stood_still_reads_nothing_from_a_connection_that_it_has_closed() -> None:
    world, sender, receiver, link = connected()
    receiver.freeze(5.0)
    receiver.call(lambda: link.close(receiver))
    link.send(sender, 1)
    world.run(10.0, lambda: False)
    assert receiver.got == []


def test_every_mutant_of_the_campaign_still_has_its_text() -> None:
    assert misplaced() == []


def test_rank_that_only_waits_survives_the_review_of_a_hang_under_min_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = dataclasses.replace(plain_plan_of(1, nodes=4, faults=0), spares=0, work_s=30.0, learns=False)
    rules = replace(plan.rules, min_nodes=3, max_nodes=4, min_healthy=True, last_call_s=3.0, launchers=0)
    stalls = Fault(at_s=6.0, kind="rank_stalls", which=1, seconds=1.0)
    plans = [dataclasses.replace(plan, seed=seed, rules=rules, faults=(stalls,)) for seed in range(4)]
    for each in plans:
        run = simulate(each)
        assert run.broken == []
        ended = [trained for trained in run.job.trained if trained.to_s is not None and trained.to_s < 6.0 + 12.0]
        assert [trained.launcher for trained in ended] == [each for each in run.job.launchers if each.hurts]
    monkeypatch.setattr(LastLook, "reviewed", _confirms_all)
    assert any("only waits" in line for each in plans for line in simulate(each).broken)


def _confirms_all(review: LastLook, found: Any, turn: Any) -> None:
    suspects, review._suspects = review._suspects, {}
    turn.do(*(OrderMonitor(local_rank, ConfirmHang(suspect.cycle)) for local_rank, suspect in suspects.items()))


def test_the_same_seed_is_the_same_run() -> None:
    one, other = (simulate(plan_of(11), tell=True) for _ in range(2))
    assert one.story == other.story
    assert one.events == other.events


def _changes(owner: Any, name: str, change: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a bug: what the function of this name returns is changed."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **more: change(real(*args, **more)))

    return plant


def _sets(*patches: tuple[Any, str, Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a bug: attributes that have these values."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        for patch in patches:
            monkeypatch.setattr(*patch)

    return plant


_never_counts = _sets((JobCycle, "restarts_used", property(lambda self: self.decision.restarts)))
_misses_silence_for_long = _sets((coordinator, "lost_s", lambda _nodes: 40.0))
_ends_for_nothing = _sets((coordinator, "lost_s", lambda _nodes: 0.5), (JobCycle, "excused_s", lambda *_: 0.5))
_is_never_cut_off = _sets((member, "CUT_OFF_S", 500.0), (member, "STALLED_S", 500.0))
_judges_nothing = _sets((JobCycle, "judge", lambda *_, **__: None))


def _leaves_one_out(monkeypatch: pytest.MonkeyPatch, choose: Callable[..., Any] = next_cycle.choose) -> None:
    def chosen(slots: Any, ready: Any, *args: Any, **more: Any) -> Any:
        return choose(slots, list(ready)[1 if slots and len(ready) > 1 else 0 :], *args, **more)

    monkeypatch.setattr(next_cycle, "choose", chosen)


def _shuffles_places(monkeypatch: pytest.MonkeyPatch, choose: Callable[..., Any] = next_cycle.choose) -> None:
    def chosen(slots: Any, *args: Any, **more: Any) -> Any:
        nodes, after = choose(slots, *args, **more)
        return nodes[::-1] if slots else nodes, after

    monkeypatch.setattr(next_cycle, "choose", chosen)


def _another(verdict: Any) -> Any:
    return verdict if verdict.node is None else replace(verdict, node=max(0, verdict.node - 1) or 1)


def _nobody(verdict: Any) -> Any:
    return replace(verdict, node=None, cause=replace(verdict.cause, text=job_lines.UNKNOWN_FAILURE))


def _given_up(verdict: Any) -> Any:
    if verdict.decision.action is not Action.RESTART:
        return verdict
    return replace(verdict, decision=replace(verdict.decision, action=Action.GIVE_UP))


def _does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def stay(self: Member, stay: Callable[..., None] = Member._stay) -> None:
        stay(self)
        self._leave(0, "")

    monkeypatch.setattr(Member, "_stay", stay)


def _each_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = Member._leave

    def leaves(self: Member, code: int, text: str, **more: bool) -> None:
        leave(self, code + int(self.identity.instance[1:]) % 2, text, **more)

    monkeypatch.setattr(Member, "_leave", leaves)


def _forgets_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new leader begins with what the launchers tell, and is silent on a decision that none has heard of."""
    made = Coordinator.__init__
    monkeypatch.setattr(Coordinator, "__init__", lambda self, *args, record=None, **more: made(self, *args, **more))


def _keeps_the_reason_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    keeps = lambda _self, text, ends_cycle=False: [] if ends_cycle else [Say(text)]  # noqa: E731
    monkeypatch.setattr(JobLinePrinter, "for_all", keeps)


def _begins_with_one_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    update = RoundCompletion.update

    def updated(self: RoundCompletion, rules: Any, *, ready: int, **more: Any) -> bool:
        return update(self, rules, ready=ready + (0 < ready == rules.min_nodes - 1), **more)

    monkeypatch.setattr(RoundCompletion, "update", updated)


def _lets_nodes_join_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def conclude(self: Coordinator, conclude: Callable[..., None] = Coordinator._conclude) -> None:
        self._rules, rules = replace(self._rules, at_once=True), self._rules
        conclude(self)
        self._rules = rules

    monkeypatch.setattr(Coordinator, "_conclude", conclude)


def _keeps_the_first_store(monkeypatch: pytest.MonkeyPatch) -> None:
    stores: list[str] = []

    def record(made: Decision, store: str, *nodes: tuple[str, ...]) -> DecisionRecord:
        stores.append(store)
        return DecisionRecord(made, stores[0], *nodes)

    monkeypatch.setattr(decider, "DecisionRecord", record)


def _goes_on_without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(self: RestartPolicy, *args: Any, decide: Callable[..., Any] = RestartPolicy.decide, **more: Any) -> Any:
        return decide(dataclasses.replace(self, max_stalled=self.max_stalled and self.max_stalled + 1), *args, **more)

    monkeypatch.setattr(RestartPolicy, "decide", decide)


def _forgets_a_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    def seat(self: Node, place: int | None, seat: Callable[..., None] = Node.seat) -> None:
        self.standing = replace(self.standing, shutdown="")
        seat(self, place)

    monkeypatch.setattr(Node, "seat", seat)


def _takes_every_end_of_a_connection_for_an_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    def disconnected(self: Node, now_s: float, *, silent: bool, reset: bool = False) -> None:
        self.link, self.silent, self.gone_s = None, silent, now_s

    monkeypatch.setattr(Node, "disconnected", disconnected)


def _seeds_until_broken(word: str, at_most: int, kind: str | None = None, first: int = 0) -> Run:
    """``kind``: there is one fault, of that kind, and long; with a + what was lost comes back.

    ``first``: the search begins with that seed, and may as well begin with any other.
    """
    for seed in itertools.islice(itertools.count(first), at_most):
        plan = plan_of(seed) if kind is None else plain_plan_of(seed)
        if kind is not None:
            comes_back = kind.endswith("+")
            faults = (Fault(at_s=8.0, kind=kind.removesuffix("+"), which=seed, seconds=75.0, comes_back=comes_back),)
            plan = dataclasses.replace(plan, faults=faults, work_s=90.0, rules=replace(plan.rules, at_once=False))
        run = simulate(plan)
        if any(line.startswith(word) for line in run.broken):
            return run
    raise AssertionError(f"{at_most} runs, and nothing was {word}")


@pytest.mark.parametrize(
    ("bug", "word", "kind", "first"),
    [
        (_never_counts, "counted_once", None, 0),
        (_leaves_one_out, "nobody_left_out", "rank_fails", 0),
        (_shuffles_places, "nobody_left_out", "rank_fails", 0),
        (_changes(job_cycle, "verdict_on", _another), "causes", None, 3),
        (_changes(job_cycle, "verdict_on", _nobody), "causes", "rank_fails", 0),
        (_misses_silence_for_long, "in_time", "host_off", 0),
        (_does_not_stay, "stays", "node_excluded", 0),
        (_ends_for_nothing, "causes", None, 2),
        (_is_never_cut_off, "no_two_cycles", "host_cut", 3),
        (_each_its_own_code, "codes", None, 7),
        (_judges_nothing, "it_ends", None, 0),
        (_forgets_the_record, "one_decision", None, 15),
        (_changes(job_cycle, "verdict_on", _given_up), "is_due", None, 3),
        (_keeps_the_reason_to_itself, "is_said", None, 0),
        (_begins_with_one_too_few, "has_its_size", None, 0),
        (_lets_nodes_join_at_once, "ends_for_a_reason", None, 19),
        (_keeps_the_first_store, "meets_at_its_store", None, 0),
        (_goes_on_without_progress, "notices_no_progress", None, 24),
        (_forgets_a_shutdown, "shuts_down", None, 410),
        (_takes_every_end_of_a_connection_for_an_exit, "c", None, 30),
    ],
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, bug: Callable[..., None], word: str, kind: str | None, first: int
) -> None:
    bug(monkeypatch)
    run = _seeds_until_broken(word, 400, kind, first)
    monkeypatch.undo()
    assert simulate(run.plan).broken == []


def test_a_seed_that_breaks_something_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    _each_its_own_code(monkeypatch)
    run = _seeds_until_broken("codes", 50, first=7)
    nodes, drop = shrunk(run.plan.seed)
    assert nodes is None or nodes <= run.plan.nodes
    assert len(drop) >= len(run.plan.faults) - 1  # one fault is enough for that one
