"""Watch of collectives on one node: when to ask for evidence because none has completed, and what follows.

Each rank writes torch's counts of its collectives to its board (`docs/watch-collectives.md`). When none of this node's
ranks has begun or completed one for the seconds of ``--ft-watch-collectives``, the coordinator is asked to collect
evidence on the ranks of all nodes, which go on; its answer is reported, and, if the user wants that, the cycle is
ended. Ranks with an enforced timeout in force are left to that. Counts of ranks that have ended their monitoring are
out of date and don't count as silence. Pure.
"""

from __future__ import annotations

from megatron_ft.config.launcher_options import END, OFF
from megatron_ft.diagnosis.cycle_cause import COLLECTIVES
from megatron_ft.diagnosis.hang_messages import Hang, Reviewed
from megatron_ft.diagnosis.launcher.deadlines import Deadlines
from megatron_ft.diagnosis.launcher.hangs_on_node import HangsOnNode
from megatron_ft.launcher.rules.events import Write
from megatron_ft.launcher.rules.node_cycle import NodeCycle
from megatron_ft.launcher.rules.turn import LATE_NS, Options, Turn
from megatron_ft.link.base.intervals import running_intervals
from megatron_ft.link.base.launcher_part import LauncherPart
from megatron_ft.link.base.pauses import Pauses
from megatron_ft.link.facts.shared import RankHung

_SHARE_OF_GROUP = 0.5
"""Share of a group's own timeout, which ends the job: the report comes before that."""
_UNKNOWN_S = 300.0
"""Default if the timeout of the process group isn't known: half of NCCL's 600 s."""
_LOOKS_PER_TIMEOUT = 8
_OFTEST_NS, _SELDOMEST_NS = 250_000_000, 10_000_000_000
_ANSWER_NS = 15_000_000_000
"""Time for the coordinator's answer; later it may have been replaced, or have found that other nodes' ranks go on."""


class CollectiveWatch(LauncherPart):
    """The watch of the running cycle on this node. ``hangs`` ends a cycle, ``deadlines`` a rank of this node."""

    HEARS = Reviewed

    def __init__(self, options: Options, pauses: Pauses, hangs: HangsOnNode, deadlines: Deadlines) -> None:
        self._options = options
        self._pauses = pauses
        self._hangs = hangs
        self._deadlines = deadlines

    # -- events -------------------------------------------------------------------------------------------------

    def begin(self, cycle: NodeCycle, turn: Turn) -> None:
        self._cycle = cycle
        self._due_ns: int | None = None
        """Time of the next look; None: nothing is watched."""
        self._grouped: set[int] = set()
        """Local ranks that had a process group."""

    def started(self, turn: Turn) -> None:
        self._set_timeout(self._options.given.watch_collectives.timeout_s)
        self._begin_anew(turn.now_ns)
        self._looked_ns = turn.now_ns
        self._due_ns = turn.now_ns + self._every_ns if self._options.given.watch_collectives.how != OFF else None

    def continued(self, now_ns: int) -> None:
        self._begin_anew(now_ns)  # no time before a stop of the whole node counts

    @property
    def alarm_ns(self) -> int | None:
        return self._due_ns

    def hear(self, event: Reviewed, turn: Turn) -> None:
        """Report the review of all ranks; the node that had asked logs it, and ends the cycle if the user wants that.
        Under ``min-healthy`` the node of the rank that keeps the others waiting ends that rank."""
        options, cycle, is_asker = self._options, self._cycle, event.asker == self._cycle.place
        if event.reports or event.decides or turn.runs != event.cycle or not cycle.is_started:
            return
        ends = options.given.watch_collectives.how == END and event.is_waited and not options.given.observe_only
        ends = ends and not (options.min_healthy and event.rank is None)  # only the rank that others wait for
        self._is_told = True
        follows = "terminating the ranks" if ends else "reported only, no rank is terminated"
        turn.say_for_all(
            f"no collective has completed on any rank for {event.verdict.elapsed_s:.0f} s: {event.text} ({follows})"
        )
        if is_asker:
            turn.do(Write(event.record(ends=ends)))
        if ends and options.min_healthy:
            self._deadlines.end_missing(event, turn)
        elif ends and is_asker and cycle.running:
            local_rank = cycle.ranks.index(event.rank) if event.rank in cycle.ranks else min(cycle.running)
            self._hangs.found(self._verdict(local_rank, event.verdict.elapsed_s, turn), turn)

    # -- what is due --------------------------------------------------------------------------------------------

    def tick(self, turn: Turn, *, is_stopping: bool) -> None:
        """Look for silence when that is due, until the launcher was asked to stop."""
        if is_stopping:
            self._due_ns = None
        if self._due_ns is None or turn.now_ns < self._due_ns:
            return
        if turn.now_ns - self._due_ns > LATE_NS:
            self._excused_ns += turn.now_ns - self._looked_ns - self._pauses.within(self._looked_ns, turn.now_ns)
        self._looked_ns, self._due_ns = turn.now_ns, turn.now_ns + self._every_ns
        if self._pauses.since_ns is None:
            self._judge(turn)

    def _set_timeout(self, timeout_s: float | None) -> None:
        self._timeout_ns = round((_UNKNOWN_S if timeout_s is None else timeout_s) * 1e9)
        self._every_ns = min(max(self._timeout_ns // _LOOKS_PER_TIMEOUT, _OFTEST_NS), _SELDOMEST_NS)

    def _begin_anew(self, now_ns: int) -> None:
        self._moved_ns = now_ns
        """Time at which the last collective was seen to begin or complete, as far as that counts."""
        self._excused_ns = 0
        """Nanoseconds since then in which the node was stopped, which don't count."""
        self._is_told = False
        """True once this silence was reported to the user."""
        self._ask_again_ns = 0
        """Earliest time of the next question, if the last one isn't answered."""

    def _judge(self, turn: Turn) -> None:
        observed = sorted(self._cycle.observed)
        known = {lr: found for lr in observed if (found := turn.seen.collectives[lr]) is not None}
        has_left = not self._grouped.intersection(observed) <= known.keys()
        self._grouped |= known.keys()
        # a rank that has ended its monitoring may go on, but its board keeps the counts of that moment
        boards = {lr: turn.board(lr) for lr in known}
        judged = {lr: known[lr] for lr, board in boards.items() if board is None or not board.closing}
        if not judged or has_left:  # no monitored rank has a process group, or one has destroyed its group
            self._begin_anew(turn.now_ns)
            return
        if self._options.given.watch_collectives.timeout_s is None:
            groups_ns = [found.group_timeout_ns for found in judged.values() if found.group_timeout_ns is not None]
            self._set_timeout(_SHARE_OF_GROUP * min(groups_ns) / 1e9 if groups_ns else None)
        newest_ns = max(found.moved_ns for found in judged.values())
        if newest_ns > self._moved_ns:
            if self._is_told:
                seconds = (newest_ns - self._moved_ns) / 1e9
                turn.say_for_all(f"collectives complete again on this node, after {seconds:.0f} s")
            self._begin_anew(newest_ns)
        silent_ns = turn.now_ns - self._moved_ns - self._excused_ns
        silent_ns -= self._pauses.within(self._moved_ns, turn.now_ns)
        left_ns = self._timeout_ns - silent_ns
        if left_ns > 0:
            self._due_ns = turn.now_ns + min(self._every_ns, left_ns)
        elif not self._is_told and turn.now_ns >= self._ask_again_ns:
            # an enforced timeout that applies to each of these ranks now does the rest
            watched = (boards[lr] for lr in judged)
            if all(board and any(each.enforced for each in running_intervals(board)) for board in watched):
                return
            # without an answer ranks of other nodes go on, or another coordinator has taken over
            self._ask_again_ns = turn.now_ns + _ANSWER_NS + self._timeout_ns
            turn.do(Hang(self._cycle.cycle, self._verdict(min(judged), silent_ns / 1e9, turn), passive=True))

    def _verdict(self, local_rank: int, elapsed_s: float, turn: Turn) -> RankHung:
        timeout_s = self._timeout_ns / 1e9
        return self._cycle.verdict(local_rank, COLLECTIVES, turn, elapsed_s=elapsed_s, timeout_s=timeout_s)
