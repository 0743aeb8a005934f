"""Cause of a cycle's end in one line: the rank that hung, or the exit that began it. Pure.

When one rank dies, the others die of it: of errors in their collectives, of the launcher's signals. These functions
decide which exit was the cause, and describe it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from msgspec.structs import replace

from megatron_ft.diagnosis.attribution import attribute
from megatron_ft.diagnosis.exits import (
    crashed_of_exception,
    describe_exit,
    is_crash,
    is_secondary_failure,
    one_line,
    was_ending,
)
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.link.base.rerun import WANTS_ANOTHER_GPU
from megatron_ft.link.base.signal_rules import signal_name
from megatron_ft.link.base.wording import counted, when
from megatron_ft.link.facts.launcher import Cause, CauseKind, RankExited
from megatron_ft.link.facts.shared import RankHung

COLLECTIVES = "collectives"
"""Kind of a verdict on ranks whose scripts call no hooks: no collective has completed on any of them."""
LOST_PEER = "lost peer"
"""Kind of a verdict on a rank that failed because another one kept it waiting, or is gone."""
_TIE_NS = 250_000_000
"""Time from the first observed exit within which the order of exits says little."""
_DYING_NS = 2_000_000_000
"""Time a large killed process may take to end; its connections are closed before that."""


def describe_hang(verdict: RankHung) -> str:
    """Return "rank 0 hung in 'step' for 3.0 s (timeout 3.0 s)"."""
    return f"rank {verdict.rank} {describe_overdue(verdict)}"


def describe_timeout(verdict: RankHung) -> str:
    """Return "timeout 3.0 s", or "learned timeout 75 s"."""
    return f"learned timeout {verdict.timeout_s:.4g} s" if verdict.learned else f"timeout {verdict.timeout_s:.1f} s"


def describe_overdue(verdict: RankHung) -> str:
    """Like ``describe_hang``, without the rank: "hung in 'step' for 3.0 s (timeout 3.0 s)"."""
    elapsed, stopped = f"{verdict.elapsed_s:.1f} s", ", process stopped" if verdict.stopped else ""
    whose = "" if verdict.exceeded_by is None else f" of rank {verdict.exceeded_by}"
    note = f"({describe_timeout(verdict)}{whose}{stopped})"
    if verdict.kind == LOST_PEER:
        return f"raised {one_line(verdict.error)}"
    if verdict.section is not None:
        return f"hung in '{verdict.section}' for {elapsed} {note}"
    within = f"within {verdict.timeout_s:g} s"
    kinds = {
        "initial_heartbeat": f"sent no first heartbeat for {elapsed} {note}",
        "heartbeat": f"sent no heartbeat for {elapsed} {note}",
        COLLECTIVES: f"keeps the others waiting: no collective has completed on any rank for {elapsed} {note}",
        "startup": f"did not start monitoring {within} (--ft-startup-timeout){stopped}",
        "exit": f"did not exit {within} after shutdown_workload_monitoring() (--ft-exit-timeout){stopped}",
    }
    return kinds.get(verdict.kind, f"hung out of section for {elapsed} {note}")


def describe_interval(verdict: RankHung) -> str:
    """Return "in 'step' for 3.0 s after iteration 7"."""
    where = f"in '{verdict.section}'" if verdict.section is not None else verdict.kind.replace("_", " ")
    return f"{where} for {verdict.elapsed_s:.1f} s{_after_iteration(verdict)}"


def describe_hang_and_iteration(verdict: RankHung) -> str:
    """Return "rank 0 hung in 'step' for 3.0 s (timeout 3.0 s) after iteration 7"."""
    return f"{describe_hang(verdict)}{_after_iteration(verdict)}"


def _after_iteration(verdict: RankHung) -> str:
    return "" if verdict.iteration is None else f" {when(verdict.iteration)}"


def hang_cause(verdict: RankHung, detail: str = "") -> Cause:
    """Return the cause of a cycle that ends because this rank hangs."""
    return Cause(
        kind=CauseKind.HANG,
        text=describe_hang(verdict),
        rank=verdict.rank,
        iteration=verdict.iteration,
        detail=detail,
        section=verdict.timed,
    )


def undetermined_hang(first: RankHung, *, detail: str) -> Cause:
    """Return the cause if the evidence names no rank; ``first`` was found hung first, and may only wait for another."""
    text = f"hang detected (first on rank {first.rank}: {describe_overdue(first)})"
    if first.kind == LOST_PEER:
        text = f"rank {first.rank} {describe_overdue(first)}, a consequence"
    if first.kind == COLLECTIVES:
        text = f"no collective has completed on any rank for {first.elapsed_s:.1f} s (timeout {first.timeout_s:.1f} s)"
    return Cause(kind=CauseKind.HANG, text=text, iteration=first.iteration, detail=detail, section=first.timed)


def find_cause(
    exits: Sequence[RankExited], verdicts: Sequence[RankHung], *, raised: Collection[int] = ()
) -> Cause | None:
    """Return why a cycle failed; None if no rank failed.

    A verdict precedes every exit, because the launcher ends what was found hung, but for a rank that had failed before
    most of the overdue time: the others only waited for that one. Otherwise the cause is the first exit
    that launcher and monitor didn't cause; among exits seen at the same time a signal from outside is likelier than an
    error that the loss of a peer would raise, too; otherwise the earliest exit or exception counts. A rank that
    had raised before it was signalled counts as a cause, even if it took so long to end that it was killed; ``raised``:
    ranks that were seen to raise, whenever they were signalled.
    """
    raised_ns = {each.rank: each.raised_at_ns for each in exits if each.raised_at_ns}
    before = [each for each in exits if each.exitcode and not (each.by_us or is_secondary_failure(each))]
    first_ns = min((each.raised_at_ns or each.at_ns for each in before), default=math.inf)
    verdicts = [
        each
        for each in verdicts  # others were ending, or waited for a rank that had failed
        if raised_ns.get(each.rank, each.at_ns) >= each.at_ns and first_ns > each.at_ns - each.elapsed_s * 0.5e9
    ]
    if verdicts:
        # two monitors may find hangs in the same millisecond: a stopped rank is the cause; otherwise a rank that is an
        # iteration behind is likelier, whichever was reported first
        return hang_cause(
            min(verdicts, key=lambda v: (not v.stopped, math.inf if v.iteration is None else v.iteration, v.at_ns))
        )
    failed = [
        # a rank killed while ending of its own exception: the exit that it would have had
        replace(each, exitcode=1, by_us=False, at_ns=each.raised_at_ns or each.at_ns)
        if each.by_us and was_ending(each, has_raised=each.rank in raised)
        else each
        for each in exits
        if each.exitcode != 0
    ]
    candidates = [rank_exit for rank_exit in failed if not rank_exit.by_us] or failed
    if not candidates:
        return None
    if reruns := [each for each in failed if each.rerun is not None]:
        return _rerun_cause(reruns)
    return _exit_cause(exits, candidates)


def _rerun_cause(reruns: Sequence[RankExited]) -> Cause:
    """Return the cause if Megatron's rerun state machine has ended the ranks, which it does on all of them by one code.

    It is the rank whose result was rejected; if that one isn't here, the others followed it.
    """
    rejected = [each for each in reruns if each.rerun_state is not None and each.rerun_state.own]
    first = min(rejected or reruns, key=lambda each: each.rank)
    return Cause(
        kind=CauseKind.REQUEST if first.rerun in WANTS_ANOTHER_GPU else CauseKind.CRASH,
        text=describe_exit(first),
        rank=first.rank,
        iteration=first.iteration,
        follows=not rejected,
        rerun=first.rerun,
    )


def _exit_cause(exits: Sequence[RankExited], candidates: Sequence[RankExited]) -> Cause:
    """Return the likeliest of these failed exits, or the rank that has left before all of them followed."""
    # an exit whose reason can't be read may be a consequence, too, and accuses nobody
    followed = [rank_exit for rank_exit in candidates if is_secondary_failure(rank_exit) or rank_exit.unread]
    first_followed = min((rank_exit.at_ns for rank_exit in followed), default=0)
    left = [each for each in exits if each.exitcode == 0 and each.at_ns <= first_followed]
    if left and len(followed) == len(candidates):
        return exited_early(
            min(left, key=lambda each: each.at_ns), f"{counted(len(followed), 'other')} failed because of it"
        )
    others = [rank_exit for rank_exit in candidates if rank_exit not in followed]
    if any((rank_exit.raised_at_ns or rank_exit.at_ns) <= first_followed + _DYING_NS for rank_exit in others):
        candidates = others  # an exit much later can't be what they followed from
    seen_first = min(rank_exit.at_ns for rank_exit in candidates)
    tied = [rank_exit for rank_exit in candidates if rank_exit.at_ns - seen_first <= _TIE_NS]
    cause = min(tied, key=_suspicion)
    parts = [f"in {cause.where}" if cause.where else ""]
    if cause.after_run:
        parts.append("before the others had ended theirs")
    if cause in followed and not cause.unread:
        parts.append("which had lost its connection to another rank")
    elif followed and cause in others:
        parts.append(f"{counted(len(followed), 'other')} failed because of it")
    detail = ", ".join(part for part in parts if part)
    return Cause(
        kind=CauseKind.CRASH if cause.exitcode >= 0 or is_crash(cause.exitcode) else CauseKind.SIGNAL,
        text=describe_exit(cause),
        rank=None if cause.unread else cause.rank,
        iteration=cause.iteration,
        detail=detail,
        follows=cause in followed,
        by_us=cause.by_us,
        attribution=None if cause.by_us else attribute(cause.error or "", cause.kernel, pid=cause.pid),
    )


def exited_early(end: RankExited | RankSnapshot, others: str, *, where: str = "") -> Cause:
    """Return the cause if a rank has exited with 0 while others waited for it. ``where``: its host, in words."""
    others = others.removeprefix("has exited with 0").removeprefix("; ")
    return Cause(
        kind=CauseKind.CRASH,
        text=f"rank {end.rank}{where} exited with 0",
        rank=end.rank,
        iteration=end.iteration,
        detail="; ".join(filter(None, ("in the middle of training", others))),
        host=end.host if isinstance(end, RankSnapshot) else "",
    )


def _suspicion(rank_exit: RankExited) -> tuple[int, int, int, int]:
    """Return a sort key by which the likeliest cause among simultaneous exits comes first."""
    name = signal_name(-rank_exit.exitcode) if rank_exit.exitcode < 0 else ""
    # a library that loses its peer aborts (SIGABRT) or raises an error; nothing sends SIGKILL for it
    is_weak = crashed_of_exception(rank_exit) or name == "SIGABRT" or not name.startswith("SIG")
    grade = 1 if is_weak else 2 if name == "SIGTERM" else 0
    return grade, rank_exit.raised_at_ns or rank_exit.at_ns, rank_exit.at_ns, rank_exit.rank


def as_verdict(note: RankSnapshot, found: RankHung) -> RankHung:
    """Return the verdict on the rank that is the cause of another one's, with the time it has been in its place."""
    state = "T" if note.is_stopped else None
    if note.rank == found.rank or found.kind in ("heartbeat", "initial_heartbeat"):
        # its sections say nothing about heartbeats; both ranks have been silent for about as long
        iteration = found.iteration if note.rank == found.rank else note.iteration
        return replace(found, rank=note.rank, local_rank=note.local_rank, iteration=iteration, state=state)
    is_overdue = note.timeout_s is not None and note.open_s >= note.timeout_s
    return RankHung(
        rank=note.rank,
        cycle=found.cycle,
        since_ns=max(0, found.at_ns - round(note.open_s * 1e9)),
        local_rank=note.local_rank,
        kind="section" if note.section is not None else "out_of_section" if found.kind == "section" else found.kind,
        section=note.section,
        learned=found.learned,
        elapsed_s=note.open_s,
        timeout_s=note.timeout_s if is_overdue and note.timeout_s is not None else found.timeout_s,
        exceeded_by=None if is_overdue or found.kind not in ("section", "out_of_section") else found.rank,
        iteration=note.iteration,
        at_ns=found.at_ns,
        state=state,
    )
