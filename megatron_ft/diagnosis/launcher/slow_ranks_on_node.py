"""How much the ranks of this node wait for others, told to the coordinator, and its answer told to the user. Pure."""

from __future__ import annotations

from msgspec.structs import asdict

from megatron_ft.config.launcher_options import OFF
from megatron_ft.diagnosis.waits import Lags, RankLag, RankWaits, Waits, window_s
from megatron_ft.launcher.rules.events import Write
from megatron_ft.launcher.rules.node_cycle import NodeCycle
from megatron_ft.launcher.rules.turn import Options, Turn
from megatron_ft.link.base.launcher_part import LauncherPart
from megatron_ft.link.facts.launcher import SlowRank


class SlowRanksOnNode(LauncherPart):
    """The waits of the running cycle."""

    HEARS = Lags

    def __init__(self, options: Options) -> None:
        self._options = options

    def begin(self, cycle: NodeCycle, turn: Turn) -> None:
        self._cycle = cycle
        self._due_ns: int | None = None
        self._slow: dict[int, RankLag] = {}
        self.lags = Lags(cycle.cycle, 0.0)
        """Which ranks of the running cycle hold the others back, on the launcher that speaks for the job."""

    def started(self, turn: Turn) -> None:
        self._every_ns = round(window_s(self._cycle.nodes) / 2 * 1e9)
        if self._options.given.watch_collectives.how != OFF and self._cycle.world_size > 1:
            self._due_ns = turn.now_ns + self._every_ns

    def ending(self, turn: Turn) -> None:
        self.lags = Lags(self._cycle.cycle, 0.0)

    @property
    def alarm_ns(self) -> int | None:
        return self._due_ns

    def tick(self, turn: Turn, *, is_stopping: bool) -> None:
        """Tell the coordinator of all looks, when that is due, until the launcher has to stop."""
        if is_stopping:
            self._due_ns = None
        if self._due_ns is None or turn.now_ns < self._due_ns:
            return
        self._due_ns = turn.now_ns + self._every_ns
        told = []
        for local_rank in sorted(self._cycle.observed):
            board, counts = turn.board(local_rank), turn.seen.collectives[local_rank]
            # nothing is read any more of a rank that has ended its monitoring
            if counts is not None and not (board is not None and board.closing):
                told.append(RankWaits(self._cycle.ranks[local_rank], counts.looks, counts.waiting, counts.waits))
        if told:
            turn.do(Waits(self._cycle.cycle, tuple(told)))

    def hear(self, event: Lags, turn: Turn) -> None:
        """Take the result for all ranks, and tell the user which ones hold the others back, or don't any more."""
        if event.cycle != turn.runs or not self._cycle.is_started:
            return
        self.lags = event
        lagging = {each.rank: each for each in event.named}
        for rank, each in {**lagging, **self._slow}.items():
            is_over = rank not in lagging
            if is_over or rank not in self._slow:
                if is_over:
                    turn.say_for_all(f"rank {rank} no longer holds the others back")
                else:
                    turn.say_for_all(f"{each.text} (reported only)")
                turn.do(Write(SlowRank(cycle=event.cycle, over_s=event.over_s, is_over=is_over, **asdict(each))))
        self._slow = lagging
