"""Records of a launcher on its ranks: their processes, how these are made, and those that hang or may."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ft.core.codec import Count, Cycle, LocalRank, Moment, Pid, Rank, Seconds

# -- their processes --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStarted:
    """A rank's process.

    Args:
        at_ns: when it was created.
    """

    rank: Rank
    local_rank: LocalRank = 0
    pid: Pid | None = None
    at_ns: Moment = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExited:
    """A rank's process has ended, at ``t``.

    Args:
        exitcode: negative is the signal that ended it; ``signal`` is that.
        by_us: the launcher or the monitor has ended it.
        iteration: done by then.
        error: its exception, if it is known.
        at_ns: when the launcher saw it.
        signals_sent: numbers of the signals that the launcher or the rank's monitor had sent it before.
        signalled_at_ns: when the launcher sent the first of them, 0 if it sent none.
        error_at_s: wall-clock time of the exception in whole seconds; raised_at_ns: monotonic time, 0 if unknown.
        where: place in the user's code, "loader.py:88 next_batch"; empty if unknown.
    """

    rank: Rank
    cycle: Cycle
    local_rank: LocalRank = 0
    pid: Pid | None = None
    exitcode: int
    signal: int | None = field(default=None, init=False)
    by_us: bool = False
    iteration: int | None = None
    error: str | None = None
    at_ns: Moment = 0
    signals_sent: tuple[int, ...] = ()
    signalled_at_ns: Moment = 0
    error_at_s: Count | None = None
    raised_at_ns: Moment = 0
    where: str = ""

    def __post_init__(self) -> None:
        if self.exitcode < 0:
            object.__setattr__(self, "signal", -self.exitcode)


@dataclass(frozen=True, slots=True, kw_only=True)
class WouldHaveEnded:
    """A rank was found hung, and isn't ended (--ft-observe-only).

    Args:
        text: the verdict in words.
    """

    rank: Rank
    cycle: Cycle
    local_rank: LocalRank | None = None
    iteration: int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorReplaced:
    """A monitor has died, or did no work any more; another one goes on with its rank.

    Args:
        pid: of the old one.
    """

    local_rank: LocalRank
    rank: Rank | None = None
    reason: str = ""
    pid: Pid | None = None


# -- how they are made: forked from the script that is run ahead, or fresh interpreters -------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServer:
    """The process that runs the script ahead, and forks ranks.

    Args:
        state: "started", "ready", "ended", "not started", or "for something else".
        where, what: at which line the script waits, and what it was about to do there.
        took_s: until it did.
        names: of the variables that the ranks have otherwise now.
        reason: why it can't be used.
    """

    state: str = ""
    pid: Pid | None = None
    where: str = ""
    what: str = ""
    took_s: Seconds | None = None
    names: tuple[str, ...] = ()
    exit_code: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkFailed:
    """Ranks couldn't be forked: this time they are fresh interpreters.

    Args:
        pids: of the fork server.
    """

    pids: tuple[Pid, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshInterpreters:
    """Ranks are no longer forked."""

    reason: str = ""


# -- those that hang, or may: what their monitors can't know alone ----------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of a hang diagnosis: which rank hung. One launcher of the job writes it.

    Args:
        text: in words.
    """

    cycle: Cycle
    rank: Rank | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreTime:
    """A learned timeout was over, but a rank made progress: this one isn't terminated yet.

    Args:
        kind, section: what was overdue, as in a ``verdict``.
        elapsed_s: for how long it had lasted.
        timeout_s: what was learned.
        until_s: how long it may last now, since it began.
        progress: who was seen to do what, in words.
    """

    rank: Rank
    cycle: Cycle
    kind: str
    section: str | None = None
    local_rank: LocalRank | None = None
    iteration: int | None = None
    elapsed_s: Seconds | None = None
    timeout_s: Seconds | None = None
    until_s: Seconds | None = None
    progress: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCollective:
    """No collective has completed on any rank for long, in a job whose script calls no hooks. One launcher writes it.

    Args:
        rank: that keeps the others waiting; null if that isn't known, or no rank waits.
        elapsed_s: for so long, when the ranks were examined.
        text: in words: who, where it is, and what the others do.
        ends: the cycle is ended for it (--ft-watch-collectives end).
    """

    cycle: Cycle
    rank: Rank | None = None
    elapsed_s: Seconds
    timeout_s: Seconds
    text: str = ""
    ends: bool = False
