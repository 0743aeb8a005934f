"""Records of a launcher about its ranks: their processes, how these are created, and hangs."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ft.core.codec import Cycle, LocalRank, Pid, Rank, Seconds

# -- their processes --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExited:
    """A rank's process has ended, at ``t``.

    Args:
        exitcode: negative for the signal that ended it, which is in ``signal``, too.
        by_us: the launcher or the monitor has ended it.
        iteration: iteration completed by then.
        error: its exception, if known.
    """

    rank: Rank
    cycle: Cycle
    local_rank: LocalRank | None = None
    pid: Pid | None = None
    exitcode: int | None = None
    signal: int | None = None
    by_us: bool = False
    iteration: int | None = None
    error: str | None = None


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
class WorkloadControl:
    """A rank sent a request to the launcher.

    Args:
        action: "Continue", "ExcludeThisNode" or "ShutdownWorkload".
    """

    action: str = ""
    description: str = ""
    rank: Rank | None = None
    pid: Pid | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorReplaced:
    """A monitor has died, or stopped working; another one takes over its rank.

    Args:
        pid: process of the old monitor.
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
        where, what: line at which the script waits, and its next act there.
        took_s: time until then.
        names: variables whose values for the ranks have changed.
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
        pids: processes of the fork server.
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
        text: the result in words.
    """

    cycle: Cycle
    rank: Rank | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreTime:
    """A learned timeout was over, but a rank made progress: this one isn't terminated yet.

    Args:
        kind, section: what was overdue, as in a ``verdict``.
        elapsed_s: duration so far.
        timeout_s: learned timeout.
        until_s: extended limit, from the start of the interval.
        progress: which rank made progress, and how, in words.
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
        rank: rank that keeps the others waiting; null if unknown, or no rank waits.
        elapsed_s: duration when the ranks were examined.
        text: the rank, its place, and what the others do, in words.
        ends: the cycle is ended for it (--ft-watch-collectives end).
    """

    cycle: Cycle
    rank: Rank | None = None
    elapsed_s: Seconds
    timeout_s: Seconds
    text: str = ""
    ends: bool = False
