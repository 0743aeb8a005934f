"""When a node trains again, and why it has failed: from its monitors' words, and from the boards of its ranks."""

from __future__ import annotations

from typing import TypeVar

import pytest

from megatron_ft.diagnosis.exceptions import CrashOutput
from megatron_ft.diagnosis.hang_messages import Hang
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.restart_policy import NodeState
from megatron_ft.launcher.rules import events
from megatron_ft.link.base.layout import BoardSnapshot
from megatron_ft.link.facts.launcher import CauseKind
from tests.support.agents import Driven, attached, found_hung, hung, observed, trains, verdict
from tests.unit.monitor.rules.test_monitor_state import board, section

MS = 1_000_000
T = TypeVar("T")


def restarted() -> Driven:
    """Its cycle 3 has failed, and its ranks of cycle 4 were made one second ago."""
    driven = Driven(max_restarts=3, max_nodes=2)
    driven.run(2, 3, nodes=2)
    driven.exits(0, 1)
    driven.ends()
    driven.exits(1, -15, sent=(15,))
    driven.hear(events.RanksEnded(), verdict(3, node=0, rank=0, text="rank 0 exited with code 1"))
    driven.now_ns += 100 * MS
    driven.run(2, 4, nodes=2)
    driven.now_ns += 1000 * MS
    return driven


def running(ranks: int = 2, *, nodes: int = 2, watched: bool = True, **options: object) -> Driven:
    driven = Driven(max_nodes=nodes, **options)
    driven.run(ranks, nodes=nodes)
    if watched:
        driven.hear(*(attached(local_rank, 0, driven.now_ns) for local_rank in range(ranks)))
    return driven


def sent(driven: Driven, kind: type[T]) -> list[T]:
    """Messages of this kind to the coordinator."""
    return [message for message in driven.told if isinstance(message, kind)]


def again(driven: Driven) -> list[str]:
    return [line for line in driven.said if "is training again" in line]


@pytest.mark.parametrize(("saves", "measured"), [(0, False), (1, True)])
def test_iteration_number_that_begins_anew_in_each_epoch_is_no_measure_of_progress(saves: int, measured: bool) -> None:
    """A number that went back after a save may as well be that of a run that was restored."""
    driven = running()
    for local_rank in (0, 1):
        driven.boards[local_rank] = board(first_iteration=0, iteration=10, iterations_back=local_rank, saves=saves)
    driven.exits(1, 9)
    (report,) = sent(driven, m.Report)
    assert (report.reached is not None) is measured


@pytest.mark.parametrize("ends", [(), (1,), (0, 1)])
def test_a_rank_that_has_ended_says_on_its_board_whether_it_was_through_a_step(ends: tuple[int, ...]) -> None:
    driven = restarted()
    for local_rank in (0, 1):
        driven.boards[local_rank] = board(first_step_at_ns=driven.now_ns)
        assert again(driven) == []
        if local_rank in ends:
            driven.exits(local_rank)
        else:
            driven.hear(trains(local_rank, 4, 0, driven.now_ns))
    driven.hear(events.Tick())
    (line,) = again(driven)
    assert line == (
        "cycle 4 is training again 1.10 s after the failure was detected "
        "(stop 0.00, rendezvous 0.10, ranks created 0.00, first step 1.00)"
    )
    assert driven.written.count("training_again") == 1


def test_a_hung_rank_that_should_be_gone_and_lives_counts_as_failed_unless_it_got_no_cpu() -> None:
    driven = running(watched=False)
    hang = hung(rank=10, local_rank=1, iteration=3)
    driven.hear(found_hung(1, 0, hang))
    assert isinstance(driven.told[1], Hang)
    driven.run_delays_ns[1] = {101: 4_000_000_000}
    driven.wait(23.9)
    assert sent(driven, m.Report) == []
    driven.wait(0.2)
    (report,) = sent(driven, m.Report)
    assert (report.state, report.cause.rank) == (NodeState.UNHEALTHY, None)
    assert report.cause.text.startswith("hang detected (first on rank 10: hung in 'step'")


@pytest.mark.parametrize("has_group", [False, True])
@pytest.mark.parametrize("forked", [False, True])
def test_phases_of_a_start_are_timed_by_the_last_rank(has_group: bool, forked: bool) -> None:
    """Up to its hello nothing is known of a script; whether it had a process group by then is."""
    driven = running(nodes=1, watched=False)
    start = driven.now_ns
    for local_rank in (0, 1):
        # the last rank counts, and of one that connects again only the first time
        at = start + local_rank * 1000
        group = has_group and local_rank == 1
        driven.hear(attached(local_rank, 0, at + 100, at + 10 if forked else None, group))
        driven.hear(attached(local_rank, 0, at + 10**9, None, group))
        driven.hear(trains(local_rank, 0, at + 200, at + 300))
    phases = driven.record.phases_ns() or {}
    user_code = {"user code": 1010} if forked else {}
    imports = "imports and process group" if has_group else "imports"
    expected = {**user_code, imports: 1100, "set up": 1200, "first step": 1300}
    assert {name: at - start for name, at in phases.items() if at > start} == expected
    assert list(phases) == ["rendezvous", "ranks created", *expected]


@pytest.mark.parametrize(
    ("error", "goes_on", "told"),
    [
        ("ValueError: the batch is empty", False, "rank 10 raised ValueError: the batch is empty, in train.py:3 step"),
        ("ValueError: the batch is empty", True, None),
        ("RuntimeError: gloo: Connection closed by peer", False, None),
        ("", False, None),
    ],
)
def test_a_rank_that_is_ending_of_its_exception_has_failed_by_itself(
    error: str, goes_on: bool, told: str | None
) -> None:
    driven, raised_ns = Driven(max_nodes=2), 5_000
    driven.run(2, nodes=2)
    moved_ns = raised_ns + (1 if goes_on else -1)
    driven.boards.update({local_rank: board(last_transition_ns=moved_ns) for local_rank in (0, 1)})
    driven.words[1] = CrashOutput(error=error, where="train.py:3 step", raised_at_ns=raised_ns)
    driven.ends()
    reports = [message.cause.text for message in sent(driven, m.Report)]
    assert reports == ([] if told is None else [told])


RAISED = CrashOutput(error="ValueError: bad", where="train.py:3 step", crashed_at="train.py:9 save", raised_at_ns=5)
ABORTED = CrashOutput(terminated_by="gloo::X: 8 vs 4")


@pytest.mark.parametrize(
    ("words", "code", "moved_ns", "text", "where"),
    [
        (RAISED, -6, 0, "raised ValueError: bad (then crashed with SIGABRT)", "train.py:3 step"),
        (RAISED, -6, 10, "crashed with SIGABRT", "train.py:9 save"),  # of something else: it has gone on
        (ABORTED, -6, 0, "raised gloo::X: 8 vs 4 (then crashed with SIGABRT)", ""),
        (ABORTED, 1, 0, "exited with code 1", ""),
    ],
)
def test_a_rank_that_crashes_while_it_ends_of_an_exception_has_raised(
    words: CrashOutput, code: int, moved_ns: int, text: str, where: str
) -> None:
    driven = running(nodes=1)
    driven.boards[1] = board(iteration=7, last_transition_ns=moved_ns)
    driven.words[1] = words
    driven.exits(1, code)
    assert driven.record.failures() == [f"rank 10 {text}"]
    assert driven.record.exits[1].where == where


def test_a_node_says_how_its_ranks_failed_in_their_start_unless_one_was_through_it() -> None:
    error = "ModuleNotFoundError: No module named 'x'"

    def told(exitcode: int = 1, after_s: float = 3.0, **words: str) -> tuple[bool, str]:
        driven = Driven(max_nodes=2)
        driven.run(2, nodes=2)
        driven.boards.update(boards)
        if boards:
            driven.hear(*(attached(local_rank, 0, driven.now_ns) for local_rank in boards))
        driven.now_ns += round(after_s * 1e9)
        driven.words[1] = CrashOutput(**words)
        driven.exits(1, exitcode)
        (report,) = sent(driven, m.Report)
        assert report.reached is not None
        return report.reached.trained, report.reached.start

    boards: dict[int, BoardSnapshot] = {}
    assert told(error=error) == (False, error)
    assert told(error=error, after_s=3600.0) == (False, "")  # without hooks nobody knows what it did in that time
    assert told() == (False, "")
    assert told(exitcode=2) == (False, "exit code 2")
    boards = {0: board(), 1: board(sections=(section(opened_at=5, count=1),))}
    assert told() == (False, "exit code 1")
    assert told(exitcode=-9) == (False, "")
    assert told(error=error, after_s=3600.0) == (False, error)
    for trained in (board(iteration=0, first_iteration=0), board(heartbeats=1), board(sections=(section(count=1),))):
        boards = {0: trained, 1: board()}
        assert told(error=error) == (True, "")


@pytest.mark.parametrize(("error", "kept"), [("ValueError: empty", [0, 10]), ("", [0])])
def test_evidence_is_kept_of_a_rank_that_was_ending_of_its_exception_when_it_was_signalled(
    error: str, kept: list[int]
) -> None:
    driven = running(nodes=1)
    driven.words[1] = CrashOutput(error=error, raised_at_ns=driven.now_ns if error else 0)
    driven.wait(0.1)
    driven.exits(0, 1)  # it has lost its peer, and is quicker
    driven.exits(1, 1, sent=(15,), signalled_at_ns=driven.now_ns)
    assert [each.ended.rank for each in driven.all_of(events.KeepEvidence)] == kept


def test_rank_found_hung_while_the_job_is_being_stopped_is_described_as_hung() -> None:
    driven = running(3, nodes=1)
    driven.stop()
    for local_rank in (0, 1):
        hang = hung(local_rank=local_rank, section="checkpointing", timeout_s=2.0, at_ns=driven.now_ns)
        more = {"waits_in": "barrier"} if local_rank == 0 else {"frame": "save.py:9 write"}
        note = RankSnapshot(
            rank=10 * local_rank, local_rank=local_rank, found_hung=True, state="S", has_stack=True, **more
        )  # type: ignore[arg-type]
        driven.hear(found_hung(local_rank, 0, hang), observed(local_rank, 0, note))
        driven.exits(local_rank, -9, sent=(9,))
    driven.exits(2, 3)
    assert sent(driven, Hang) == [], "the others may be saving something"
    assert driven.record.failures() == [
        "rank 10 hung in 'checkpointing' for 2.0 s (timeout 2.0 s), in save.py:9 write, holding the GIL",
        "rank 0 hung in 'checkpointing' for 2.0 s (timeout 2.0 s), in barrier",
        "rank 20 exited with code 3",
    ]


@pytest.mark.parametrize(
    ("after_s", "rank", "text"),
    [
        (2.0, 10, "rank 10 raised ValueError: bad"),
        (4.9, 10, "rank 10 raised ValueError: bad"),
        (9.0, None, "rank 10 exited with code 1, its error file can't be read"),
    ],
)
def test_report_waits_5_s_for_an_error_file_and_accuses_nobody_without_it(
    after_s: float, rank: int | None, text: str
) -> None:
    driven = running()
    driven.words[1] = CrashOutput(unread=True)
    driven.exits(1, 1)
    driven.wait(min(after_s, 4.8))
    assert (sent(driven, m.Report), driven.all_of(events.KeepEvidence)) == ([], [])
    if after_s < 5:
        driven.words[1] = CrashOutput(error="ValueError: bad", raised_at_ns=driven.now_ns)
    driven.wait(0.3)
    (report,) = sent(driven, m.Report)
    (kept,) = driven.all_of(events.KeepEvidence)
    assert (report.cause.text, report.cause.rank, report.cause.follows) == (text, rank, rank is None)
    assert kept.ended.unread == (rank is None)
    assert driven.written.count("rank_exited") == 1


def test_cycle_that_ends_meanwhile_is_explained_by_what_was_read_until_then() -> None:
    """Another rank's own error counts, whenever it comes, before an exit whose error can't be read."""
    driven = running(3, nodes=1)
    driven.words[1] = CrashOutput(unread=True)
    driven.words[2] = CrashOutput(error="KeyError: 'shard'", raised_at_ns=driven.now_ns + 300 * MS)
    driven.exits(1, 1)
    driven.now_ns += 400 * MS
    driven.exits(2, 1)
    driven.ends()
    driven.exits(0, -15, sent=(15,))
    driven.hear(events.RanksEnded())
    assert driven.written.count("rank_exited") == 3
    assert [each.ended.rank for each in driven.all_of(events.KeepEvidence)] == [20, 10]
    assert driven.record.cause().text == "rank 20 raised KeyError: 'shard'"


EXITING = CrashOutput(exiting=True)
EXITED = CrashOutput(exiting=True, exited=True)


@pytest.mark.parametrize(
    ("words", "code", "closing", "flag", "is_over"),
    [
        (EXITING, -11, True, False, True),
        (EXITED, 1, True, False, False),  # sys.exit(1)
        (CrashOutput(), -9, True, False, False),  # the script went on after its monitoring
        (CrashOutput(), -9, True, True, True),
        (EXITING, -11, False, True, False),  # it has not ended its monitoring
        (CrashOutput(exiting=True, error="OSError: export", raised_at_ns=1), 1, True, True, False),
    ],
)
def test_crash_counts_as_the_end_of_a_run_only_after_monitoring_and_script_have_ended(
    words: CrashOutput, code: int, closing: bool, flag: bool, is_over: bool
) -> None:
    driven = running()
    driven.is_finished, driven.words[1] = flag, words
    driven.boards.update({0: board(closing=True), 1: board(closing=closing)})
    driven.exits(1, code)
    assert (sent(driven, m.Report) == []) is is_over
    assert driven.record.exits[1].after_run is is_over
    driven.exits(0)
    assert sent(driven, m.Report)[0].state is (NodeState.SUCCEEDED if is_over else NodeState.UNHEALTHY)
    assert len([line for line in driven.said if line.endswith("after its run had ended")]) == is_over


@pytest.mark.parametrize(("code", "ends_s"), [(0, 8.0), (0, 15.0), (1, 8.0)])
def test_crash_after_a_run_is_a_failure_if_others_fail_or_have_not_ended_theirs_10_s_later(
    code: int, ends_s: float
) -> None:
    driven = running()
    driven.words[1] = EXITING
    driven.boards.update({0: board(), 1: board(closing=True)})
    driven.exits(1, -11)
    driven.wait(ends_s)
    driven.boards[0] = board(closing=True)
    driven.hear(events.Tick())
    driven.wait(100.0)  # it waits for no other event
    driven.exits(0, code)
    report = sent(driven, m.Report)[0]
    assert report.state is (NodeState.SUCCEEDED if code == 0 and ends_s < 10 else NodeState.UNHEALTHY)
    if report.state is NodeState.UNHEALTHY:
        told = "rank 10 crashed with SIGSEGV after its run had ended, before the others had ended theirs"
        assert report.cause.text.startswith(told)


@pytest.mark.parametrize(
    ("ranks", "nodes", "stopped", "rank"), [(1, 1, False, 0), (2, 1, False, None), (2, 1, True, 0), (1, 2, False, None)]
)
def test_rank_found_hung_is_accused_without_evidence_only_if_it_is_alone_or_stopped(
    ranks: int, nodes: int, stopped: bool, rank: int | None
) -> None:
    driven = running(ranks, nodes=nodes)
    driven.hear(found_hung(0, 0, hung(at_ns=driven.now_ns, state="T" if stopped else None)))
    driven.exits(0, -9, sent=(9,))
    cause = driven.record.cause()
    assert (cause.kind, cause.rank) == (CauseKind.HANG, rank)
    assert cause.text.startswith("hang detected (first on rank 0" if rank is None else "rank 0 hung in 'step'")


@pytest.mark.parametrize(
    ("exits_s", "unread", "text"),
    [
        (0.1, False, "rank 10 exited with code 3"),
        (0.1, True, "rank 10 exited with code 3, its error file can't be read"),
        (1.9, False, "hang detected (first on rank 0: hung in 'step' for 2.0 s (timeout 1.0 s))"),
    ],
)
def test_rank_that_exits_before_most_of_the_time_of_a_hang_is_its_cause(
    exits_s: float, unread: bool, text: str
) -> None:
    driven = running()
    began_ns = driven.now_ns
    driven.words[1] = CrashOutput(unread=True)
    driven.now_ns = began_ns + round(exits_s * 1e9)
    driven.exits(1, 3)
    driven.now_ns = began_ns + 2000 * MS
    driven.hear(found_hung(0, 0, hung(since_ns=began_ns, at_ns=driven.now_ns)))
    driven.words[1] = CrashOutput(unread=unread)
    driven.wait(6.0)
    assert sent(driven, m.Report)[0].cause.text.startswith(text)
    assert driven.record.cause().text == text
