"""How ranks' ends are worded, which of several is the cause, and which failed starts are the user's mistake."""

from __future__ import annotations

import signal
from typing import Any

import msgspec
import pytest

from megatron_ft.diagnosis.cycle_cause import describe_hang, find_cause
from megatron_ft.diagnosis.exits import describe_exit, failure_signature, is_by_us, is_secondary_failure
from megatron_ft.link.facts.launcher import Cause, CauseKind, RankExited
from megatron_ft.link.facts.shared import RankHung

MS = 1_000_000


def ended(rank: int, code: int, at_ms: float = 0, sent: tuple[int, ...] = (), **more: Any) -> RankExited:
    return RankExited(
        rank=rank,
        cycle=0,
        local_rank=rank,
        pid=100 + rank,
        exitcode=code,
        at_ns=round(at_ms * MS),
        signals_sent=sent,
        by_us=is_by_us(code, sent),
        **more,
    )


def hang(rank: int = 0, **more: Any) -> RankHung:
    given: dict[str, Any] = {
        "kind": "section",
        "section": "step",
        "elapsed_s": 3.04,
        "timeout_s": 3.0,
        "iteration": 40,
        "at_ns": 5000 * MS,
    }
    return RankHung(cycle=0, since_ns=0, rank=rank, local_rank=rank, **{**given, **more})


def cause_of(exits: list[RankExited], hangs: list[RankHung]) -> Cause:
    found = find_cause(exits, hangs)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("rank_exit", "words"),
    [
        (ended(1, -9), "rank 1 killed by SIGKILL (not sent by ft_launcher)"),
        (ended(1, -9, sent=(15, 9)), "rank 1 killed by SIGKILL"),
        (ended(1, -9, sent=(15,)), "rank 1 killed by SIGKILL (not sent by ft_launcher)"),
        (ended(0, -11), "rank 0 crashed with SIGSEGV"),
        (ended(0, -6, error="ValueError: bad"), "rank 0 raised ValueError: bad (then crashed with SIGABRT)"),
        (ended(0, -signal.SIGRTMIN - 1), f"rank 0 killed by signal {signal.SIGRTMIN + 1} (not sent by ft_launcher)"),
        (ended(3, 1, error="AssertionError: "), "rank 3 raised AssertionError"),
        (ended(3, 0), "rank 3 finished"),
        (ended(3, 137), "rank 3 exited with code 137 (128 + SIGKILL)"),
        (ended(3, 1, error="RuntimeError: boom\n  again"), "rank 3 raised RuntimeError: boom again"),
        (ended(3, -9, error="RuntimeError: boom"), "rank 3 killed by SIGKILL (not sent by ft_launcher)"),
        (ended(0, 1, error="ValueError: " + "x" * 1000), f"rank 0 raised ValueError: {'x' * 185}..."),
    ],
)
def test_exit_of_a_rank_is_described_by_code_signal_and_error(rank_exit: RankExited, words: str) -> None:
    assert describe_exit(rank_exit) == words


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (hang(state="T"), "rank 0 hung in 'step' for 3.0 s (timeout 3.0 s, process stopped)"),
        (hang(kind="out_of_section", section=None), "rank 0 hung out of section for 3.0 s (timeout 3.0 s)"),
        (hang(kind="heartbeat", section=None), "rank 0 sent no heartbeat for 3.0 s (timeout 3.0 s)"),
        (hang(kind="initial_heartbeat", section=None), "rank 0 sent no first heartbeat for 3.0 s (timeout 3.0 s)"),
    ],
)
def test_hang_is_described_by_its_kind_and_timeout(verdict: RankHung, words: str) -> None:
    assert describe_hang(verdict) == words


@pytest.mark.parametrize(
    ("exits", "rank", "kind"),
    [
        # the first one that isn't our doing
        ([ended(0, -15, 1, sent=(15,)), ended(1, 3, 5)], 1, CauseKind.CRASH),
        ([ended(0, 1, 0), ended(1, 1, 400)], 0, CauseKind.CRASH),
        # at the same time: a kill from outside before errors of those who lost a peer
        ([ended(0, 1, 0), ended(1, -9, 3)], 1, CauseKind.SIGNAL),
        ([ended(0, 1, 0), ended(1, -11, 3)], 1, CauseKind.CRASH),
        # ... but not if it came much later
        ([ended(0, 1, 0), ended(1, -9, 900)], 0, CauseKind.CRASH),
        # the earlier exit or error; an exit without an error doesn't lose against errors that it caused
        (
            [ended(0, 1, 9, error="e", raised_at_ns=8 * MS), ended(1, 1, 10, error="e", raised_at_ns=7 * MS)],
            1,
            CauseKind.CRASH,
        ),
        ([ended(0, 1, 0), ended(1, 1, 9, error="e", raised_at_ns=7 * MS)], 0, CauseKind.CRASH),
        ([ended(0, 1, 8), ended(1, 1, 9, error="e", raised_at_ns=7 * MS)], 1, CauseKind.CRASH),
        # SIGTERM of somebody else is the least likely: often a scheduler's, for all
        ([ended(0, -15, 0), ended(1, 1, 3)], 1, CauseKind.CRASH),
        # nothing but our own signals: still an answer
        ([ended(0, -15, 7, sent=(15,)), ended(1, 0)], 0, CauseKind.SIGNAL),
    ],
)
def test_cause_is_the_first_exit_that_is_no_consequence(exits: list[RankExited], rank: int, kind: CauseKind) -> None:
    cause = cause_of(exits, [])
    assert (cause.rank, cause.kind) == (rank, kind)
    assert cause_of(exits[::-1], []) == cause


def test_verdict_wins_over_ends_and_that_on_a_stopped_rank_or_one_behind_over_others() -> None:
    """Found in a demo: the rank that waits was told of half a millisecond before the one that had been stopped."""
    waits, stopped = hang(rank=1, at_ns=100 * MS), hang(rank=0, at_ns=101 * MS, state="T")
    cause = cause_of([], [waits, stopped])
    assert cause.rank == 0
    behind = hang(rank=2, at_ns=101 * MS, iteration=39)
    cause = cause_of([ended(0, -9, 0, sent=(9,)), ended(1, 1, 0)], [waits, behind])
    assert (cause.kind, cause.rank, cause.iteration) == (CauseKind.HANG, 2, 39)
    cause = cause_of([], [hang(2, at_ns=9), hang(0, at_ns=8)])
    assert cause.rank == 0


LOST = "RuntimeError: [third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (LOST, True),
        ("DistNetworkError: The client socket has timed out after 60000ms", True),
        ("DistStoreError: wait timeout after 2000ms, keys: /default_pg/0//cpu//0/0", True),
        ("RuntimeError: [Rank 0]: Ranks 2 failed to pass monitoredBarrier in 2000 ms", True),
        # a user's own connections break, too
        ("ConnectionRefusedError: [Errno 111] Connection refused", False),
        ("RuntimeError: shape mismatch in nccl_check", False),
    ],
)
def test_error_of_a_rank_that_lost_a_peer_is_a_consequence(error: str, follows: bool) -> None:
    assert is_secondary_failure(ended(1, 1, error=error)) == follows
    assert is_secondary_failure(ended(1, -6, error=error)) == follows  # it crashed while its interpreter ended
    assert not is_secondary_failure(ended(1, -9, error=error))


FOLLOWS, ALSO = ended(0, 1, 100, error=LOST), ended(2, 1, 110, error=LOST)
LEFT = ended(1, 0, 90, iteration=5)
LEFT_LATER = ended(1, 0, 200, iteration=5)
FAILED = ended(1, 7, 300, where="loader.py:88 next_batch")


@pytest.mark.parametrize(
    ("exits", "hangs", "rank", "line"),
    [
        ([FOLLOWS, FAILED], [], 1, "code 7, in loader.py:88 next_batch, 1 other failed because of it"),
        ([FOLLOWS, ended(1, -6, 5000)], [], 0, "which had lost its connection to another rank"),  # much later
        ([FOLLOWS], [], 0, "which had lost its connection to another rank"),
        # one had exited with 0 before the others lost it
        ([FOLLOWS, LEFT, ALSO], [], 1, "after iteration 5, in the middle of training; 2 others failed because of it"),
        ([FOLLOWS, LEFT_LATER], [], 0, "which had lost its connection to another rank"),
        ([FOLLOWS, LEFT, ended(2, -9, 100)], [], 2, "1 other failed because of it"),
        # it had raised before it was found hung: its interpreter took longer to end than the rest of its timeout
        ([ended(0, 1, 5400, error=LOST, raised_at_ns=4200 * MS), LEFT], [hang(0)], 1, "1 other failed because of it"),
        ([ended(0, 1, 5400, error=LOST, raised_at_ns=5200 * MS), LEFT], [hang(0)], 0, "after iteration 40"),
    ],
)
def test_lost_peer_is_the_cause_only_if_no_other_rank_failed_at_that_time(
    exits: list[RankExited], hangs: list[RankHung], rank: int, line: str
) -> None:
    cause = cause_of(exits, hangs)
    assert (cause.rank, cause.follows) == (rank, rank == 0 and cause.kind is not CauseKind.HANG)
    assert cause.line.endswith(line)


def test_a_rank_that_took_long_to_end_of_its_exception_is_the_cause_even_if_we_have_ended_it() -> None:
    """Chaos seed 61: it had let go of its connections, so the other one ended first, and the cycle with it."""
    first = ended(0, 1, 1000, error=LOST, raised_at_ns=900 * MS)
    slow = ended(
        1, -15, 1050, (15,), signalled_at_ns=1005 * MS, error="ValueError: x", raised_at_ns=50 * MS, where="a.py:3 step"
    )
    cause = cause_of([first, slow], [])
    assert cause.line == "rank 1 raised ValueError: x, in a.py:3 step, 1 other failed because of it"
    assert cause.kind is CauseKind.CRASH
    # the same, but it has come to its end by itself
    by_itself = ended(1, 1, 5000, error="ValueError: x", raised_at_ns=50 * MS)
    assert cause_of([first, by_itself], []) == msgspec.structs.replace(cause, detail="1 other failed because of it")
    # one that has lost a peer is no cause, however slow the other one is to end: chaos seed 427
    killed = ended(0, -9, 1000)
    ended_by_us = ended(1, -15, 1050, sent=(15,), signalled_at_ns=1005 * MS, error=LOST, raised_at_ns=600 * MS)
    for waited in (ended_by_us, ended(1, 1, 600, error=LOST)):
        cause = cause_of([killed, waited], [])
        assert cause.rank == 0
    # what it raises when we end it is our doing
    asked = msgspec.structs.replace(slow, raised_at_ns=1010 * MS)
    cause = cause_of([first, asked], [])
    assert cause.rank == 0


# -- failed starts --------------------------------------------------------------------------------------------


MISTAKES = (
    "ModuleNotFoundError: No module named 'pycuda'",
    "AssertionError: world size (3) is not divisible by 2",
    "FileNotFoundError: [Errno 2] No such file or directory: 'vocab.json'",
)


@pytest.mark.parametrize(
    "error",
    [
        *MISTAKES,
        "OSError: [Errno 98] Address already in use",
        "DistNetworkError: The server socket has failed to listen on any local network address.",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "OSError: [Errno 116] Stale file handle: '/ckpt'",
    ],
)
def test_error_that_may_come_from_outside_has_no_failure_signature(error: str) -> None:
    mistake = error if error in MISTAKES else ""
    for is_watched in (True, False):
        assert failure_signature(ended(1, 1, error=error), is_watched=is_watched, lived_s=20.0) == mistake
    assert failure_signature(ended(1, 1, error=error), is_watched=False, lived_s=61.0) == ""
    assert failure_signature(ended(1, -9, error=error), is_watched=True, lived_s=20.0) == ""
    # without an error the monitoring tells whether it had begun
    told = [failure_signature(ended(1, code), is_watched=True, lived_s=1e5) for code in (1, 2, 137)]
    assert told == ["exit code 1", "exit code 2", ""]
    told = [failure_signature(ended(1, code), is_watched=False, lived_s=1.0) for code in (1, 2, 137)]
    assert told == ["", "exit code 2", ""]
