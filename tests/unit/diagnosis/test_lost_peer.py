"""Ranks fail because another one kept them waiting: which one is named, and what the nodes and the coordinator do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from megatron_ft.diagnosis.collectives import Collective
from megatron_ft.diagnosis.cycle_cause import LOST_PEER
from megatron_ft.diagnosis.exceptions import CrashOutput
from megatron_ft.diagnosis.hang_diagnosis import blamed
from megatron_ft.diagnosis.hang_messages import DiagnoseHang, Hang, RankSnapshots
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.coordinator import Coordinator
from megatron_ft.job.rules.restart_policy import NodeState
from megatron_ft.link.facts.launcher import Cause, CauseKind
from megatron_ft.link.messages.monitor_messages import Collect
from tests.support.agents import Driven, attached, hung, observed
from tests.support.job_machines import begun, links, sent

RULES, HOSTS = m.Rules(min_nodes=2, max_nodes=5, max_restarts=3), ("h0", "h1", "h2", "h3", "h4")

TIMED_OUT = "RuntimeError: [gloo/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"
FIRST = hung(kind=LOST_PEER, section=None, elapsed_s=0.0, timeout_s=0.0, iteration=4, at_ns=9, error=TIMED_OUT)


def failed(rank: int, error: str = TIMED_OUT, *, gone: bool = True) -> RankSnapshot:
    return RankSnapshot(rank=rank, gone=gone, raised=error, exitcode=1 if gone else None, host=f"host-{rank}")


def waiting(rank: int) -> RankSnapshot:
    entered = Collective(group="0", seq=5, op="all_reduce", ranks=(0, 1, 2, 3), backend="gloo")
    return RankSnapshot(
        rank=rank, state="S", has_stack=True, has_collectives=True, in_flight=(entered,), enqueued={"gloo/0": 5}
    )


def stuck(rank: int, *, state: str = "S", section: str | None = "step", quiet_s: float = 5.1) -> RankSnapshot:
    return RankSnapshot(
        rank=rank,
        host=f"host-{rank}",
        state=state,
        has_stack=True,
        has_collectives=True,
        enqueued={"gloo/0": 4},
        frame="train.py:7 next_batch",
        section=section,
        open_s=5.1,
        quiet_s=quiet_s,
        iteration=4,
    )


def left(rank: int, exitcode: int = 0) -> RankSnapshot:
    return RankSnapshot(rank=rank, gone=True, exitcode=exitcode)


def cause(*notes: RankSnapshot, error: str = TIMED_OUT, are_all: bool = True, several: bool = False) -> Cause:
    found = blamed(notes, replace(FIRST, error=error), are_all=are_all, several=several)
    assert found is not None
    return found


CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.3]:27041"


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (CLOSED, "gloo connection closed"),
        ("DistNetworkError: Connection refused", "torch.distributed connection refused"),
        (
            "DistBackendError: NCCL error: remote process exited or there was a network error, NET/IB: Got completion "
            "from peer 10.0.0.2 with status=12 opcode=0 vendor err 129",
            "nccl connection failed",
        ),
    ],
)
def test_connection_that_was_lost_accuses_no_rank_that_lives_however_late_it_is(error: str, how: str) -> None:
    notes = (failed(0, error), stuck(1, quiet_s=60.0), failed(2, error), failed(3, error))
    found = cause(*notes, error=error, several=True)
    assert (found.rank, found.host, found.text) == (None, "", "connection lost between ranks 0, 2 and 3")
    assert found.line.endswith(f"no rank had exited before (network: {how})")


IN_STEP = "rank 2 keeps the others waiting in 'step' for 5.1 s"
NEVER_CAME = "DistStoreError: wait timeout after 4000ms"


@pytest.mark.parametrize(
    ("notes", "error", "rank", "text"),
    [
        # it neither waits nor has lost a peer
        ((failed(0), stuck(2), failed(1), failed(3)), TIMED_OUT, 2, IN_STEP),
        ((failed(0), stuck(2), waiting(1), failed(3, gone=False)), TIMED_OUT, 2, IN_STEP),
        ((failed(0), stuck(2), waiting(1), waiting(3)), TIMED_OUT, 2, IN_STEP),
        # it was late for as long as the others have waited
        ((failed(0), stuck(2, quiet_s=4.6), failed(1), failed(3)), TIMED_OUT, 2, IN_STEP),
        ((failed(0), stuck(2, quiet_s=2.5), failed(1)), TIMED_OUT, None, "connection lost between ranks 0 and 1"),
        ((failed(0), stuck(2, state="T", section=None)), TIMED_OUT, 2, "keeps the others waiting (process stopped)"),
        # a rank is still in the collective
        (
            (failed(0, CLOSED), stuck(1), replace(waiting(2), raised=CLOSED)),
            CLOSED,
            None,
            "connection lost between ranks 0 and 2 in all_reduce #5",
        ),
        # gone before, for a connection that was closed as for a timeout
        ((failed(0, CLOSED), left(1), failed(2, CLOSED)), CLOSED, 1, "rank 1 exited with 0"),
        ((failed(0), left(2), waiting(1), waiting(3)), TIMED_OUT, 2, "rank 2 exited with 0"),
        # it never connected
        ((failed(0, NEVER_CAME), RankSnapshot(rank=2)), NEVER_CAME, 2, "rank 2 keeps the others waiting"),
        # an exception of its own comes first
        (
            (failed(0), stuck(1), replace(failed(2, "ValueError: a", gone=False), state="S")),
            TIMED_OUT,
            2,
            "rank 2 raised ValueError: a",
        ),
        # a rank that computes may be about to come
        ((failed(0), replace(stuck(1), is_busy=True), stuck(2)), TIMED_OUT, 2, IN_STEP),
        ((failed(0), stuck(1), stuck(2)), TIMED_OUT, None, f"rank 0 raised {TIMED_OUT}, a consequence"),
    ],
)
def test_rank_is_accused_of_lost_peers_only_where_the_evidence_shows_it(
    notes: Sequence[RankSnapshot], error: str, rank: int | None, text: str
) -> None:
    found = cause(*notes, error=error)
    assert (found.rank, found.text.endswith(text)) == (rank, True), found.text
    if text == IN_STEP:
        assert (found.kind, found.iteration) == (CauseKind.HANG, 4)
        assert found.detail.startswith("in train.py:7 next_batch; ")
        assert found.detail.endswith(f"rank 0 raised {TIMED_OUT}")
    assert cause(*notes, error=error, several=True).text.replace(" (host-2)", "") == found.text


def test_rank_is_not_accused_without_evidence_on_all_ranks_and_none_where_none_is_missing() -> None:
    assert cause(failed(0), stuck(1), are_all=False).rank is None
    assert blamed((failed(0), failed(1)), FIRST, are_all=True, several=False) is None


# -- a node ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", ["none", "exit", "exception"])
def test_node_asks_for_evidence_before_it_reports_a_lost_peer_unless_it_has_a_failure_of_its_own(own: str) -> None:
    driven = Driven(max_nodes=2)
    driven.run(2, nodes=2)
    driven.hear(*(attached(local_rank, 0, driven.now_ns) for local_rank in (0, 1)))
    driven.words[0] = CrashOutput(error=TIMED_OUT)
    if own == "exit":
        driven.exits(1, -9)
    elif own == "exception":
        driven.words[1] = CrashOutput(error="ValueError: empty", raised_at_ns=driven.now_ns)
    driven.exits(0, 1)
    kinds = [type(each) for each in driven.told if isinstance(each, Hang | m.Report)]
    assert kinds == ([Hang, m.Report] if own == "none" else [m.Report])
    if own == "none":
        assert [each.local_rank for each in driven.orders(Collect)] == [1]
        driven.hear(observed(1, 0, stuck(10)))
        (notes,) = (each for each in driven.told if isinstance(each, RankSnapshots))
        assert [(note.rank, note.gone, note.exitcode) for note in notes.notes] == [(0, True, 1), (10, False, None)]


# -- the coordinator ------------------------------------------------------------------------------------------


def reports(text: str, *, follows: bool) -> m.Report:
    return m.Report(0, NodeState.UNHEALTHY, Cause(text=text, kind=CauseKind.CRASH, rank=1, follows=follows))


def failing(*, dies: int | None = None, is_reset: bool = False) -> Coordinator:
    """Its node 1 has lost a peer and asked for evidence, just after the launcher on another one died."""
    machine = begun(RULES, HOSTS)
    at_s = 0.0 if dies is None else 1.0
    if dies is not None:
        machine.broken(dies, at_s, reset=is_reset)
    effects = machine.heard(1, Hang(0, FIRST), at_s)
    assert links(effects, DiagnoseHang) == [link for link in range(5) if link != dies]
    machine.heard(1, reports("rank 1 timed out", follows=True), at_s)
    assert verdicts(machine, at_s) == []
    return machine


def verdicts(machine: Coordinator, now_s: float) -> list[m.Verdict]:
    return sent(machine.settle(now_s), m.Verdict)


def test_cycle_ends_for_the_missing_rank_once_all_nodes_have_reported() -> None:
    machine = failing()
    for link in range(5):
        note = stuck(link) if link == 3 else failed(link)
        machine.heard(link, RankSnapshots(0, (note,)), 0.1)
    (judged,) = verdicts(machine, 0.1)
    assert (judged.cause.rank, judged.cause.text) == (3, "rank 3 (host-3) keeps the others waiting in 'step' for 5.1 s")


def test_failure_of_another_node_explains_lost_peers_at_once() -> None:
    machine = failing()
    machine.heard(2, reports("rank 2 killed by SIGKILL", follows=False), 0.1)
    (judged,) = verdicts(machine, 0.1)
    assert (judged.node, judged.cause.text) == (2, "rank 2 killed by SIGKILL")


def test_node_whose_launcher_died_is_named_also_where_the_evidence_on_others_does_not_come_in_time() -> None:
    """Node 0 says nothing, so the cause is undetermined when the time is over; by then node 3 may yet come back."""
    machine = failing(dies=3, is_reset=True)
    for link in (1, 2, 4):
        machine.heard(link, RankSnapshots(0, (failed(link),)), 1.1)
    judged = []
    for at_s in (2.0, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0):
        for link in (0, 1, 2, 4):
            machine.heard(link, m.Beat(), at_s)
        judged += verdicts(machine, at_s)
    assert [each.node for each in judged] == [3]
    assert "no message from its launcher" in judged[0].cause.text


def test_launcher_that_comes_back_during_a_diagnosis_is_asked_for_its_evidence() -> None:
    machine = failing(dies=3)
    running = m.NodeStatus(m.NodePhase.RUNNING, 0)
    effects = machine.heard(7, m.Hello("job", RULES, "h3", "h3", standing=running), 1.1)
    assert links(effects, DiagnoseHang) == [7]


@pytest.mark.parametrize("others_wait", [False, True])
def test_nodes_without_evidence_are_named_where_no_cause_is_found_in_time(others_wait: bool) -> None:
    machine = failing()
    for link in range(5):
        if link != 3:
            note = waiting(link) if others_wait and link == 2 else failed(link)
            machine.heard(link, RankSnapshots(0, (note,)), 0.1)
    assert verdicts(machine, 2.2) == verdicts(machine, 2.4) == []  # another node's failure may yet be reported
    (judged,) = verdicts(machine, 2.8)
    assert (judged.cause.rank, judged.cause.text) == (None, f"rank 0 raised {TIMED_OUT}, a consequence")
    assert judged.cause.detail == "root cause undetermined; no evidence from node 3 (h3)"


def test_rank_that_was_killed_while_another_one_hung_is_named_as_its_node_has_reported_it() -> None:
    machine = begun(RULES, HOSTS)
    machine.heard(0, Hang(0, replace(FIRST, kind="section", section="step", error="")), 0.0)
    machine.heard(1, reports("rank 1 killed by SIGKILL", follows=False), 0.1)
    for link in range(5):
        note = RankSnapshot(rank=1, gone=True, exitcode=-9) if link == 1 else waiting(link)
        machine.heard(link, RankSnapshots(0, (note,)), 0.1)
    (judged,) = verdicts(machine, 0.1)
    assert (judged.node, judged.cause.kind, judged.cause.text) == (1, CauseKind.CRASH, "rank 1 killed by SIGKILL")


@pytest.mark.parametrize(("state", "rank"), [(None, None), ("T", 0)])
def test_rank_found_hung_first_is_accused_without_any_evidence_only_if_it_is_stopped(
    state: str | None, rank: int | None
) -> None:
    machine = begun(RULES, HOSTS)
    hung = replace(FIRST, kind="section", section="step", error="", state=state)
    machine.heard(1, Hang(0, hung), 0.0)
    judged: list[m.Verdict] = []
    for at_s in (1.0, 2.0, 3.0, 4.0):
        for link in range(5):
            machine.heard(link, m.Beat(), at_s)
        judged += verdicts(machine, at_s)
    assert [each.cause.rank for each in judged] == [rank]
