"""The last look before a rank is terminated, as `megatron_ft.learning` describes it. Pure.

With ``min-healthy`` a monitor also asks when a configured timeout is over: the nodes go on without a rank that hangs,
so that only one that others wait for is terminated. A rank that only waits goes on for its timeout once more.
"""

from __future__ import annotations

from msgspec.structs import replace

from megatron_ft.diagnosis.cycle_cause import describe_hang_and_iteration, describe_interval
from megatron_ft.diagnosis.hang_messages import Hang, Reviewed
from megatron_ft.diagnosis.launcher.deadlines import Deadlines
from megatron_ft.launcher.rules.events import OrderMonitor, Write
from megatron_ft.launcher.rules.node_cycle import NodeCycle
from megatron_ft.launcher.rules.turn import Options, Turn
from megatron_ft.learning.rule import MOST_EXTENDED
from megatron_ft.link.base.launcher_part import LauncherPart
from megatron_ft.link.facts.launcher import MoreTime
from megatron_ft.link.facts.shared import RankHung
from megatron_ft.link.messages.monitor_messages import ExtendTimeout, RankReport, Suspect

_MORE = 1.25
_LEAST_MORE_S = 1.0


class LastLook(LauncherPart):
    """The suspects of the running cycle on this node. ``deadlines`` terminates ranks that their monitors don't."""

    HEARS = Reviewed

    def __init__(self, options: Options, deadlines: Deadlines) -> None:
        self._options = options
        self._deadlines = deadlines

    def begin(self, cycle: NodeCycle, turn: Turn) -> None:
        self._cycle = cycle
        self._suspects: dict[int, RankHung] = {}
        """Suspects by local rank."""
        self._events: dict[int, int] = {}
        """Number of events on the board of each rank when the first of these was suspected, by local rank."""
        self._said: set[tuple[int | None, str]] = set()
        """Extended intervals (the iteration, and what is timed) that were reported to the user, each once."""

    def hear_monitor(self, local_rank: int, report: RankReport, turn: Turn) -> None:
        """Have all ranks of the job examined, if a timeout of a rank of this node is over."""
        if not (isinstance(report, Suspect) and turn.runs is not None and self._cycle.has(local_rank, report.cycle)):
            return
        verdict = replace(report.verdict, rank=self._cycle.ranks[local_rank])
        if not self._suspects:
            boards = {each: turn.board(each) for each in self._cycle.observed}
            self._events = {each: board.ring_head for each, board in boards.items() if board is not None}
        self._suspects[local_rank] = verdict
        turn.do(Hang(self._cycle.cycle, verdict, passive=True, decides=True))

    def hear(self, review: Reviewed, turn: Turn) -> None:
        """Confirm the suspects that hang, and let the others go on.

        With ``min-healthy``, terminate the rank of this node that keeps the others waiting, if its own timeout isn't
        over.
        """
        cycle, min_healthy = self._cycle, self._options.min_healthy
        if not review.decides or turn.runs != review.cycle or not cycle.is_started:
            return
        suspects, self._suspects = self._suspects, {}
        heads = {local_rank: board.ring_head for local_rank in self._events if (board := turn.board(local_rank))}
        moved = (each for each, head in heads.items() if head > self._events[each])  # since the first suspicion
        own = next((f"rank {cycle.ranks[each]} has called a hook" for each in moved), "")
        progress = review.progress or own
        for local_rank, verdict in sorted(suspects.items()):
            elapsed_s, most_s = verdict.elapsed_s, MOST_EXTENDED * verdict.timeout_s
            is_enforced = verdict.learned and verdict.enforced
            only_waits = min_healthy and review.hanging and verdict.rank not in review.hanging
            if progress and verdict.learned and elapsed_s < most_s:
                until_s = min(max(_MORE * elapsed_s, elapsed_s + _LEAST_MORE_S), most_s)
                turn.do(OrderMonitor(local_rank, ExtendTimeout(verdict.cycle, until_s)))
                turn.do(Write(MoreTime(verdict=verdict, until_s=until_s, progress=progress)))
                interval = verdict.iteration, verdict.timed
                if is_enforced and interval not in self._said:
                    self._said.add(interval)
                    turn.say(
                        f"rank {verdict.rank}: {describe_interval(verdict)}, longer than its learned timeout of "
                        f"{verdict.timeout_s:.4g} s, but {progress}: extending the timeout, to at most "
                        f"{most_s:.1f} s in total"
                    )
            elif only_waits and verdict.enforced and local_rank in cycle.running:
                turn.do(OrderMonitor(local_rank, ExtendTimeout(verdict.cycle, elapsed_s + verdict.timeout_s)))
                timed = f"{describe_interval(verdict)} (timeout {verdict.timeout_s:.1f} s)"
                turn.say(f"rank {verdict.rank}: {timed}, only waits for others and goes on: {review.text}")
            else:
                turn.do(OrderMonitor(local_rank, ExtendTimeout(verdict.cycle)))
                if progress and is_enforced and not self._options.given.observe_only:
                    turn.say(
                        f"{describe_hang_and_iteration(verdict)}: its timeout is extended to at most "
                        f"{most_s:.1f} s, terminating it although ranks make progress"
                    )
        if min_healthy and review.hanging and review.rank is None:
            cycle.undecided = review.text  # lists the candidates
        if min_healthy and review.hanging == (review.rank,):
            self._deadlines.end_missing(review, turn, suspects)
