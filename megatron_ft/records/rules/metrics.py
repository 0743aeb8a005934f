"""Metrics of a job: their names, and their values by its records and the readings of a moment. Pure.

`docs/telemetry.md` lists them. No iteration, PID or rank is a label of a counter: series must not grow with a run.
"""

from __future__ import annotations

import bisect
import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_ft.diagnosis.cycle_cause import COLLECTIVES
from megatron_ft.diagnosis.waits import RankLag
from megatron_ft.link.facts.all_kinds import Record
from megatron_ft.link.facts.launcher import PHASES, CauseKind, CycleStarted, NodeLost
from megatron_ft.link.facts.minutes import BOUNDS_S, HEARTBEAT, OUT_OF_SECTION
from megatron_ft.link.facts.monitor import Minute
from megatron_ft.records.rules.accounting import Accounting

SHOWN_BOUNDS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
"""Upper bounds of the buckets of a histogram but the last, which has none; all are among `BOUNDS_S`."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Number of section times in each bucket of `SHOWN_BOUNDS_S` and in the last one, and their sum."""

    counts: tuple[int, ...] = (0,) * (len(SHOWN_BOUNDS_S) + 1)
    sum_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric. ``of_job``: the launcher at place 0 serves it for the whole job; else each one for its node."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    of_job: bool = True

    @property
    def kind(self) -> str:
        """Type of the metric, as Prometheus calls it."""
        return "counter" if self.name.endswith("_total") else "histogram" if self is SECTIONS else "gauge"


RESTARTS = Metric(
    name="megatron_ft_restarts_total",
    labels=("cause",),
    help="Restarts of all ranks, by the kind of their cause.",
)
HANGS = Metric(
    name="megatron_ft_hangs_total",
    labels=("section",),
    help="Cycles ended by a hang, by the section (or kind of interval) that was overdue.",
)
REPORTED = Metric(
    name="megatron_ft_reported_hangs_total",
    labels=("section",),
    help="Hangs that were reported and ended no rank, by what was overdue.",
)
DOWNTIME = Metric(
    name="megatron_ft_downtime_seconds_total",
    labels=("phase",),
    help="Seconds from the detection of failures to the first step after them, by phase.",
)
REDONE = Metric(
    name="megatron_ft_redone_iterations_total",
    help="Iterations that were done, lost by a failure, and done again.",
)
GOODPUT = Metric(
    name="megatron_ft_goodput_ratio",
    help="Share of the job's time so far that went into steps that count.",
)
TIME = Metric(
    name="megatron_ft_time_seconds",
    labels=("class",),
    help="The job's time so far by class; a failure moves seconds from one to another.",
)
ITERATION = Metric(name="megatron_ft_iteration", help="Iterations done, by the most advanced rank.")
NODE_STATE = Metric(
    name="megatron_ft_node_state",
    labels=("node", "state"),
    help="1 for the state of the node, 0 for the others.",
    of_job=False,
)
TIMEOUT = Metric(
    name="megatron_ft_timeout_seconds",
    labels=("section",),
    help="Timeout in force, configured or learned.",
)
SECTIONS = Metric(
    name="megatron_ft_section_seconds",
    labels=("section",),
    help="Times of sections on the ranks of the node.",
    of_job=False,
)
RANK_LAG = Metric(
    name="megatron_ft_rank_lag_ratio",
    labels=("rank", "node"),
    help="Share of their time that the others wait for this rank; of the worst eight.",
)
METRICS = (
    RESTARTS,
    HANGS,
    REPORTED,
    DOWNTIME,
    REDONE,
    GOODPUT,
    TIME,
    ITERATION,
    TIMEOUT,
    RANK_LAG,
    NODE_STATE,
    SECTIONS,
)


class NodeActivity(enum.Enum):
    """State of a node in ``megatron_ft_node_state``."""

    WAITING = "waiting"
    """Waits for the other nodes, checks its health, or starts its ranks."""
    TRAINING = "training"
    ENDING = "ending"
    """Its ranks end, or have ended, and what follows isn't decided yet."""
    STANDBY = "standby"
    UNFIT = "unfit"
    """Its health check fails."""
    LEAVING = "leaving"
    LOST = "lost"
    ENDED = "ended"
    """The job is over for it."""


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one metric, by the values of its labels."""

    metric: Metric
    values: Mapping[tuple[str, ...], float | Histogram]


@dataclass(frozen=True, slots=True, kw_only=True)
class GaugeValues:
    """Values at one moment; None is unknown."""

    iteration: int | None = None
    accounting: Accounting = Accounting()  # noqa: RUF009 - frozen
    timeouts: Mapping[str, float] = field(default_factory=dict)
    nodes: Mapping[str, NodeActivity] = field(default_factory=dict)
    lags: Sequence[RankLag] = ()


class JobMetrics:
    """Values for the metrics of one job beside its accounting: lost nodes, and the times of sections."""

    def __init__(self) -> None:
        self._lost: set[str] = set()
        self._sections: dict[str, Histogram] = {}
        self.is_at_place_0 = False
        """True if the last cycle that began on the node of the last record has it at place 0."""

    def hear(self, record: Record, host: str = "") -> None:
        """Take a record; ``host`` tells the nodes apart if records of several come."""
        match record:
            case CycleStarted():
                self.is_at_place_0 = record.group_rank == 0
                self._lost -= {host, *record.back}
            case NodeLost():
                self._lost.add(record.node)
            case Minute():
                sections = [each for rank in record.ranks for each in rank.sections.items()]
                for name, of in (each for each in sections if each[0] not in (OUT_OF_SECTION, HEARTBEAT)):
                    before = self._sections.get(name, Histogram())
                    counts = list(before.counts)
                    for bucket, count in of.counts.items():
                        end_s = BOUNDS_S[bucket] if bucket < len(BOUNDS_S) else float("inf")
                        counts[bisect.bisect_left(SHOWN_BOUNDS_S, end_s)] += count
                    self._sections[name] = Histogram(tuple(counts), before.sum_s + of.total_s)

    def series(self, now: GaugeValues, *, of_job: bool) -> list[Series]:
        """Return all values. ``of_job``: also those of the whole job."""
        states = {**(dict.fromkeys(self._lost, NodeActivity.LOST) if of_job else {}), **now.nodes}
        of_node = [
            Series(
                NODE_STATE,
                {(node, each.value): each is state for node, state in states.items() for each in NodeActivity},
            ),
            Series(SECTIONS, {(section,): times for section, times in self._sections.items()}),
        ]
        return [*_of_job(now), *of_node] if of_job else of_node


def _of_job(now: GaugeValues) -> Iterable[Series]:
    accounting, goodput = now.accounting, now.accounting.goodput
    ended = [(each, each.cause) for each in accounting.cycles if each.cause is not None]
    # a series that doesn't begin with 0 shows no first increase
    restarts = Counter({kind.value: 0 for kind in CauseKind})
    restarts.update(cause.kind.value for cycle, cause in ended if cycle.restarts)
    hangs, reported = Counter(dict.fromkeys(now.timeouts, 0)), Counter(dict.fromkeys((*now.timeouts, COLLECTIVES), 0))
    hangs.update(cause.section for _, cause in ended if cause.kind is CauseKind.HANG)
    reported.update(each.section for each in accounting.hangs)
    downtime = dict.fromkeys(PHASES, 0.0)
    for cycle in accounting.cycles:
        for phase, seconds in cycle.phases.items():
            downtime[phase] = downtime.get(phase, 0.0) + seconds
    for metric, counts in ((RESTARTS, restarts), (HANGS, hangs), (REPORTED, reported), (DOWNTIME, downtime)):
        yield Series(metric, {(label,): count for label, count in counts.items()})
    yield Series(REDONE, {(): 0 if goodput is None else goodput.redone})
    yield Series(GOODPUT, {} if goodput is None else {(): goodput.share})
    yield Series(TIME, {} if goodput is None else {(of.value,): seconds for of, seconds in goodput.seconds.items()})
    yield Series(ITERATION, {} if now.iteration is None else {(): now.iteration})
    yield Series(TIMEOUT, {(section,): seconds for section, seconds in now.timeouts.items()})
    yield Series(RANK_LAG, {(str(each.rank), each.node): each.lag for each in now.lags})
