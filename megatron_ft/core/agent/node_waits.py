"""How much the ranks of this node wait for others, told to the coordinator, and its answer told to the user. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from megatron_ft.core.agent import cycle_lines
from megatron_ft.core.agent.effects import Write
from megatron_ft.core.agent.record import CycleRecord
from megatron_ft.core.agent.turn import Options, Turn
from megatron_ft.core.board.layout import CollectiveCounts
from megatron_ft.core.facts.launcher import SlowRank
from megatron_ft.diagnosis.waits import Lags, RankLag, RankWaits, Waits, window_s


class NodeWaits:
    """The waits of one cycle, from the start of its ranks."""

    def __init__(self, options: Options, record: CycleRecord, *, nodes: int, world: int, now_ns: int) -> None:
        self._record = record
        self._every_ns = round(window_s(nodes) / 2 * 1e9)
        self.alarm_ns = now_ns + self._every_ns if options.watches_collectives and world > 1 else None
        """Time of the next ``go_on``; None: it does nothing."""
        self._told: dict[int, RankWaits] = {}
        """By local rank, all looks that the coordinator was told of."""
        self.lags = Lags(record.cycle, 0.0)
        """The last result, on the launcher that speaks for the job."""
        self._slow: dict[int, RankLag] = {}

    def go_on(self, turn: Turn, *, is_stopping: bool) -> None:
        """Tell the coordinator of the looks since the last time, when that is due, until the launcher has to stop."""
        if is_stopping:
            self.alarm_ns = None
        if self.alarm_ns is None or turn.now_ns < self.alarm_ns:
            return
        self.alarm_ns = turn.now_ns + self._every_ns
        boards = {local_rank: turn.seen.boards[local_rank] for local_rank in sorted(self._record.observed)}
        # nothing is read any more of a rank that has ended its monitoring
        monitored = [local_rank for local_rank, board in boards.items() if board is None or not board.closing]
        more = [self._more(local_rank, turn.seen.collectives[local_rank]) for local_rank in monitored]
        told = tuple(each for each in more if each is not None)
        if told:
            turn.do(Waits(self._record.cycle, told))

    def _more(self, local_rank: int, counts: CollectiveCounts | None) -> RankWaits | None:
        """Return the looks since the last time; None without any."""
        if counts is None:
            return None
        rank = self._record.ranks[local_rank]
        now = RankWaits(rank, counts.looks, counts.waiting, counts.waits)
        before = self._told.get(local_rank, RankWaits(rank, 0, 0, 0))
        self._told[local_rank] = now
        looks = now.looks - before.looks
        if looks <= 0:  # none, or it is another board: the rank has begun its monitoring again
            return None
        return RankWaits(rank, looks, max(0, now.waiting - before.waiting), max(0, now.waits - before.waits))

    def hear(self, lags: Lags, turn: Turn) -> None:
        """Take the result for all ranks, and tell the user which ones hold the others back, or don't any more."""
        self.lags = lags
        if lags.slow is None:
            return
        lagging = {each.rank: each for each in lags.named}
        for rank, each in lagging.items():
            if rank not in self._slow:
                turn.say_for_all(cycle_lines.slow_rank(each))
                turn.do(Write(self._fact(each, lags)))
        for rank, each in self._slow.items():
            if rank not in lagging:
                turn.say_for_all(cycle_lines.slow_no_more(rank))
                turn.do(Write(replace(self._fact(each, lags), is_over=True)))
        self._slow = lagging

    def _fact(self, lag: RankLag, lags: Lags) -> SlowRank:
        return SlowRank(
            cycle=self._record.cycle,
            rank=lag.rank,
            node=lag.node,
            lag=lag.lag,
            waits=lag.waits,
            over_s=lags.over_s,
        )
