"""Reports of a monitor to its launcher, which writes the node's event log.

A monitor without a launcher, or whose launcher has died, writes a log of its own.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from megatron_ft.diagnosis.evidence import RankEvidence
from megatron_ft.errors import ProtocolError
from megatron_ft.learning.messages import Intervals
from megatron_ft.link.base.codec import Fact, Message
from megatron_ft.link.base.layout import BoardSnapshot
from megatron_ft.link.base.rate_limiter import RateLimiter
from megatron_ft.link.facts import monitor as records
from megatron_ft.link.facts import shared
from megatron_ft.link.facts.shared import RankHung, Warning_
from megatron_ft.link.file_queue import FileQueue
from megatron_ft.link.files.evidence_files import write_evidence
from megatron_ft.link.linux.processes import read_stat
from megatron_ft.link.log import MONITOR
from megatron_ft.link.messages.monitor_messages import Observation
from megatron_ft.link.messages.rank_messages import RankHello
from megatron_ft.link.wire import Channel, ChannelClosedError, Received
from megatron_ft.monitor.process import AttachedRank
from megatron_ft.monitor.watched_rank import WatchedRank
from megatron_ft.records.event_log import EventLog

_WRITING_S = 1.0
"""Seconds to finish writing. Must stay below the time a launcher waits for its monitors."""


class Reports:
    """Sends reports to the launcher and logs them. A launcher that is gone or stuck delays a report by a second at
    most."""

    def __init__(self, open_log: Callable[[], EventLog], launcher: Channel | None, *, local_rank: int = 0) -> None:
        """``open_log``: creates this monitor's own log; called at most once."""
        self._open_log = open_log
        self._log: EventLog | None = None
        self._files = FileQueue()
        self._written: deque[shared.Evidence | Warning_] = deque()
        """Results of the thread that writes evidence, to be reported."""
        self._launcher = launcher
        self._local_rank = local_rank
        self.launcher_is_gone = False
        """True once the launcher has ended; nothing is sent to it from then on."""
        self._complaints: dict[str, RateLimiter] = {}

    def tell(self, report: Message | Fact, fds: Sequence[int] = ()) -> None:
        """Send one message to the launcher."""
        MONITOR.debug("to launcher", report)
        if self._launcher is None or self.launcher_is_gone:
            return
        try:
            self._launcher.send(report, fds)
        except ChannelClosedError:
            self.launcher_is_gone = True

    def from_launcher(self) -> list[Received]:
        """Return messages from the launcher; sets ``launcher_is_gone`` once the connection has ended."""
        assert self._launcher is not None
        try:
            return self._launcher.receive(everything=False)
        except (ChannelClosedError, ProtocolError):
            self.launcher_is_gone = True
            return []

    def record(self, record: records.Record | shared.Record) -> None:
        """Put a fact in the event log: the launcher's, if it is there."""
        if self._launcher is not None and not self.launcher_is_gone:
            self.tell(record)
        if self._launcher is None or self.launcher_is_gone:  # also if it was lost just now
            self._log = self._log or self._open_log()
            self._log.write(record)

    def warn(self, text: str) -> None:
        """Write a warning to the event log, and have the launcher print it."""
        self.record(Warning_(text=text))

    def complain(self, kind: str, text: str) -> None:
        """Warn, rate-limited per ``kind``; a repeated warning says how often it occurred."""
        admitted = self._complaints.setdefault(kind, RateLimiter()).admit(text, time.monotonic())
        if admitted is not None:
            self.warn(admitted)

    def attached(self, attached: AttachedRank, greeting: RankHello) -> None:
        """Report that a rank is watched. The launcher gets the descriptors that a replacement monitor needs."""
        report = records.Attached(
            rank=attached.rank,
            cycle=attached.cycle,
            pid=attached.pid,
            watch_only=greeting.watch_only,
            user_code_ns=greeting.user_code_ns or None,
            has_group=greeting.has_group,
            state_path=greeting.state_path,
            learns=greeting.learns,
            at_ns=time.monotonic_ns(),
        )
        self.tell(report, attached.fds)
        if self._launcher is None and not greeting.watch_only:
            self.record(report)

    def evidence(self, log_dir: str | None, evidence: RankEvidence) -> None:
        """Send the launcher the snapshot of a rank, and write the evidence files."""
        self.tell(Observation(evidence.cycle, evidence.note))

        def write(log_dir: str) -> None:
            try:
                self._written.append(write_evidence(log_dir, evidence))
            except OSError as error:
                text = f"the evidence on rank {evidence.note.rank} can't be written: {error.strerror}"
                self._written.append(Warning_(text=text))

        if log_dir is not None:
            self._files.do(functools.partial(write, log_dir))

    def report_written(self) -> None:
        """Report evidence that was written by now."""
        while self._written:
            self.record(self._written.popleft())

    def finish_writing(self) -> None:
        """Report what is written within `_WRITING_S`; the rest is lost."""
        until_s = time.monotonic() + _WRITING_S
        self._files.finish(_WRITING_S)
        self.report_written()
        if self._log is not None:
            self._log.close(max(0.0, until_s - time.monotonic()))

    def news(self, watched: WatchedRank, snapshot: BoardSnapshot) -> None:
        """Report what the board shows for the first time: timeouts, first iteration and step, milestones."""
        for news in () if snapshot.watch_only else watched.take_news(snapshot):
            if isinstance(news, Intervals):
                self.tell(news)
            else:
                self.record(news)

    def minute(self, watched: WatchedRank, *, at_once: bool = False, is_last: bool = False) -> None:
        """Record the intervals of the last minute, if it is over."""
        minute = watched.take_minute(at_once=at_once, is_last=is_last)
        if minute is not None:
            self.record(minute)

    def rank_gone(self, attached: AttachedRank, snapshot: BoardSnapshot | None) -> None:
        """Log the last known place of a rank that ended."""
        if snapshot is not None and snapshot.watch_only:
            return
        record = records.RankGone(
            rank=attached.rank,
            cycle=attached.cycle,
            pid=attached.pid,
            iteration=snapshot and snapshot.iteration,
            open_sections=() if snapshot is None else tuple(s.name for s in snapshot.open_sections),
            last_transition_ns=snapshot and snapshot.last_transition_ns,
        )
        self.record(record)

    def rank_hung(self, attached: AttachedRank, verdict: RankHung, *, observed_only: bool = False) -> RankHung:
        """Return the record of a rank that hangs; ``observed_only``: it won't be signalled."""
        stat = read_stat(attached.pid)
        state = None if stat is None else stat.state
        return replace(
            verdict, rank=attached.rank, local_rank=self._local_rank, state=state, observed_only=observed_only
        )
