"""Records of several kinds of processes."""

from __future__ import annotations

from typing import ClassVar

from megatron_ft.link.base.codec import Count, Cycle, Fact, Int, LocalRank, Moment, Pid, Rank, Seconds


class LogOpened(Fact, frozen=True, kw_only=True):
    """The first record of each file, about its writer.

    Args:
        wall_ns: nanoseconds since the epoch at ``t``; the difference turns this log's times into dates.
        schema: version of these records.
        role: "launcher", "monitor" or "rank".
        host: name of the node.
        run_id: the job's --rdzv-id.
        rank, cycle: of a rank, whose log is of one cycle.
        local_rank: of a monitor or a rank.
        began_ns: start of the process, of a launcher only.
    """

    wall_ns: Count
    pid: Pid
    schema: Count = 0
    role: str = ""
    host: str = ""
    run_id: str = ""
    local_rank: LocalRank | None = None
    rank: Rank | None = None
    cycle: Cycle | None = None
    began_ns: Moment | None = None


class RecordsLost(Fact, frozen=True, kw_only=True):
    """Records are missing here, because the log's directory didn't answer."""

    count: Count = 0


class Warning_(Fact, frozen=True, kw_only=True):  # noqa: N801 - its name in a log is "warning", which Python has already
    """A warning for a person.

    Args:
        text: the printed line.
    """

    text: str = ""


class RankHung(Fact, frozen=True, kw_only=True):
    """A rank was found hung: by its monitor, or by its launcher because it didn't connect or didn't end in time.

    Args:
        kind: "section", "out_of_section", "initial_heartbeat" or "heartbeat"; from a launcher "startup" or "exit".
        section: overdue section, if there is one.
        since_ns: start of the time without progress.
        elapsed_s: from ``since_ns`` to the verdict.
        iteration: iteration completed by then.
        open_sections: names, outermost first.
        state: state of its process, as in /proc: "R", "S", "D", "T".
        observed_only: it isn't ended (--ft-observe-only, or a timeout that isn't enforced).
        text: the verdict in words, from a launcher only.
        learned: the timeout was calculated from observed intervals.
        enforced: ranks that exceed the timeout may be ended.
        error: the exception of a rank that has lost a peer, in one line.
        exceeded_by: the rank whose timeout was exceeded, if it isn't this one.
    """

    rank: Rank
    cycle: Cycle
    kind: str
    at_ns: Moment
    since_ns: Moment
    elapsed_s: Seconds
    timeout_s: Seconds
    section: str | None = None
    local_rank: LocalRank = 0
    pid: Pid | None = None
    iteration: Int | None = None
    open_sections: tuple[str, ...] = ()
    state: str | None = None
    observed_only: bool = False
    text: str | None = None
    learned: bool = False
    enforced: bool = True
    error: str = ""
    exceeded_by: Rank | None = None
    NAME: ClassVar[str] = "verdict"

    @property
    def stopped(self) -> bool:
        """The process was stopped by a signal (SIGSTOP, SIGTSTP)."""
        return self.state == "T"

    @property
    def is_certain(self) -> bool:
        """Return True if the rank surely hung: its timeout is the user's, or it was stopped. A learned one may err."""
        return self.stopped or not self.learned

    @property
    def was_extended(self) -> bool:
        """Return True if the interval outlasted its learned timeout, because ranks made progress."""
        return self.learned and self.elapsed_s > 1.2 * self.timeout_s

    @property
    def key(self) -> tuple[str, str | None, int]:
        """Identity of the interval, as in `link.base.intervals`."""
        return self.kind, self.section, self.since_ns

    @property
    def timed(self) -> str:
        """Kind of interval that was overdue."""
        return self.section or self.kind


class Evidence(Fact, frozen=True, kw_only=True):
    """Evidence on a rank that hung or died was written to a file.

    Args:
        file: path relative to the log directory.
        summary: its first line.
        took_s: duration of collecting it.
    """

    rank: Rank
    cycle: Cycle
    file: str = ""
    summary: str = ""
    took_s: Seconds | None = None


Record = LogOpened | RecordsLost | Warning_ | RankHung | Evidence
