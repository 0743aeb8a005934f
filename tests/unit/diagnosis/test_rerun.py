"""What the ends of ranks by Megatron's rerun state machine mean, who is named for them, and what follows."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from megatron_ft.diagnosis.cycle_cause import find_cause
from megatron_ft.job.rules import actions
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.coordinator import Coordinator
from megatron_ft.job.rules.decisions import DecisionRecord
from megatron_ft.job.rules.faults import fault_of
from megatron_ft.job.rules.restart_policy import NodeState
from megatron_ft.link.base.rerun import WANTS_ANOTHER_GPU, Rerun, RerunState
from megatron_ft.link.facts.launcher import Cause, CauseKind, RankExited
from tests.support.job_machines import RULES, answers, begun, sent

WILL, AGAIN = "WILL_RERUN_FROM_CHECKPOINT", "RERUNNING_AGAIN_FROM_CHECKPOINT"
IN_PLACE, FROM_CHECKPOINT = "RERUNNING_IN_PLACE", "RERUNNING_FROM_CHECKPOINT"
MEANINGS = {
    (16, WILL): Rerun.ELSEWHERE,
    (16, AGAIN): Rerun.AGAIN,
    (17, IN_PLACE): Rerun.TRANSIENT,
    (17, FROM_CHECKPOINT): Rerun.CONCLUDED,
}


def ended(rank: int, code: int, state: str | None = None, *, own: bool = False, **more: Any) -> RankExited:
    machine = None if state is None else RerunState(state=state, own=own, node="n1" if own else "", device=3)
    given = {"pid": 1, "at_ns": rank, **more}
    return RankExited(rank=rank, cycle=0, local_rank=rank, exitcode=code, rerun_state=machine, **given)


@pytest.mark.parametrize(
    ("code", "state", "kind", "text"),
    [
        (16, WILL, CauseKind.REQUEST, "asks to re-run from the checkpoint on another GPU (Megatron exit code 16)"),
        (16, AGAIN, CauseKind.REQUEST, "got the same GPU and asks again to re-run from the checkpoint on another one"),
        (17, IN_PLACE, CauseKind.CRASH, "computed a wrong result that the same GPU did not reproduce"),
        (17, FROM_CHECKPOINT, CauseKind.CRASH, "has re-run a rejected result of GPU 3 on n1 on another GPU"),
    ],
)
def test_the_rank_whose_result_was_rejected_is_named(code: int, state: str, kind: CauseKind, text: str) -> None:
    others = [ended(0, code, state), ended(1, -15, state, signals_sent=(15,)), ended(3, code, state)]
    cause = find_cause([*others, ended(2, code, state, own=True)], [])
    assert cause is not None
    assert (cause.rank, cause.kind, cause.follows, cause.rerun) == (2, kind, False, MEANINGS[code, state])
    assert cause.text.startswith(f"rank 2 {text}")
    elsewhere = find_cause(others, [])
    assert elsewhere is not None
    assert (elsewhere.rank, elsewhere.follows) == (0, True)


def next_decision(machine: Coordinator, cycle: int, nodes: str, *, ranks: int, rerun: Rerun | None) -> DecisionRecord:
    """All nodes report the end of a cycle, the second one its cause; what is decided then."""
    effects: list[actions.CoordinatorEffect] = []
    for link in range(len(nodes)):
        kind = CauseKind.REQUEST if rerun in WANTS_ANOTHER_GPU else CauseKind.CRASH
        cause = Cause(text="why", kind=kind, rank=link, follows=link != 1, rerun=rerun)
        report = m.Report(cycle, NodeState.UNHEALTHY, cause, ranks=ranks)
        effects += machine.heard(link, report, 0.0)
    effects += machine.settle(0.0)
    (verdict,) = sent(effects, m.Verdict)
    assert (verdict.node, verdict.cause.rerun) == (1, rerun)
    assert (fault_of(verdict) is None) is (rerun is not None and rerun is not Rerun.TRANSIENT)
    for link in range(len(nodes)):
        machine.heard(link, m.Ready(), 0.0)
    effects = answers(machine, machine.settle(0.0))
    (made,) = [effect for effect in effects if isinstance(effect, DecisionRecord)]
    return made


@pytest.mark.parametrize(
    ("nodes", "ranks", "reruns", "shifts", "last"),
    [
        ("ab", 8, [Rerun.ELSEWHERE, None, Rerun.ELSEWHERE], [1, 1, 2], "ab"),
        ("abc", 1, [Rerun.ELSEWHERE], [0], "bca"),
        ("ab", 8, [Rerun.ELSEWHERE, Rerun.AGAIN], [1, 1], "ba"),  # ranks take their new GPUs for the same
    ],
)
def test_ranks_or_nodes_stay_rotated_and_each_request_rotates_them_further(
    nodes: str, ranks: int, reruns: list[Rerun | None], shifts: list[int], last: str
) -> None:
    machine = begun(replace(RULES, max_nodes=len(nodes)), nodes)
    made = [next_decision(machine, cycle, nodes, ranks=ranks, rerun=rerun) for cycle, rerun in enumerate(reruns)]
    assert ([each.decision.shift for each in made], made[-1].instances) == (shifts, (*last,))
