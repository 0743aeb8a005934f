"""What a monitor tells: to its launcher, if it has one, and to its own event log."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ft.core.board.hang_detector import Verdict
from megatron_ft.core.board.layout import BoardSnapshot
from megatron_ft.core.diagnosis.rank_snapshot import RankNote
from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.rate_limiter import Moderation
from megatron_ft.ipc.files.event_log import EventLog
from megatron_ft.ipc.files.evidence_files import write_evidence
from megatron_ft.ipc.linux.processes import read_stat
from megatron_ft.ipc.monitor_process import AttachedRank
from megatron_ft.ipc.wire import Channel, ChannelClosedError, Received
from megatron_ft.monitor.hello import Hello
from megatron_ft.monitor.progress import next_batch, taken
from megatron_ft.monitor.watched_rank import WatchedRank, seconds

_WRITING_S = 1.0
"""Less than a launcher waits for the end of its monitors."""


class Reports:
    """Sends and writes; a launcher that is gone or takes nothing is never waited for longer than a second."""

    def __init__(self, log: EventLog, launcher: Channel | None, local_rank: int) -> None:
        self._log = log
        self._launcher = launcher
        self._local_rank = local_rank
        self.launcher_is_gone = False
        self._complaints: dict[str, Moderation] = {}

    def tell(self, message_type: str, fds: Sequence[int] = (), /, **fields: Any) -> None:
        """Send one message to the launcher."""
        if self._launcher is None or self.launcher_is_gone:
            return
        try:
            self._launcher.send({"type": message_type, "local_rank": self._local_rank, **fields}, fds)
        except ChannelClosedError:
            self.launcher_is_gone = True

    def from_launcher(self) -> list[Received]:
        """Messages of the launcher; sets ``launcher_is_gone`` when it is."""
        assert self._launcher is not None
        try:
            return self._launcher.receive(everything=False)
        except (ChannelClosedError, ProtocolError):
            self.launcher_is_gone = True
            return []

    def write(self, ev: str, /, **fields: Any) -> None:
        """Write one record to the event log only."""
        self._log.write(ev, **fields)

    def warn(self, text: str) -> None:
        """Something a person should know: in the log and on the launcher's output."""
        self._log.write("warning", text=text)
        self.tell("warning", text=text)

    def complain(self, kind: str, text: str) -> None:
        """A warning that may come again and again: then it is said seldom, with how often it came."""
        admitted = self._complaints.setdefault(kind, Moderation()).admit(text, time.monotonic())
        if admitted is not None:
            self.warn(admitted)

    def attached(self, attached: AttachedRank, greeting: Hello) -> None:
        """A rank is watched from now on; the launcher gets what a replacement monitor would need."""
        who = {
            "rank": attached.rank,
            "cycle": attached.cycle,
            "pid": attached.pid,
            "user_code_ns": greeting.user_code_ns or None,
            "has_group": greeting.has_group,
            "at_ns": time.monotonic_ns(),
        }
        self._log.write("attached", **who)
        self.tell("attached", attached.fds, **who)

    def verdict(self, attached: AttachedRank, verdict: Verdict, at_ns: int, *, observed_only: bool) -> None:
        """A rank hangs; said before it is signalled, or, ``observed_only``, without that it is."""
        stat = read_stat(attached.pid)
        facts: dict[str, Any] = {
            "rank": attached.rank,
            "cycle": attached.cycle,
            "pid": attached.pid,
            "kind": verdict.kind.value,
            "section": verdict.section,
            "since_ns": verdict.since_ns,
            "elapsed_s": verdict.elapsed_ns / 1e9,
            "timeout_s": verdict.timeout_ns / 1e9,
            "iteration": verdict.iteration,
            "open_sections": list(verdict.open_sections),
            "state": None if stat is None else stat.state,
            "observed_only": observed_only,
            "at_ns": at_ns,
        }
        self.tell("verdict", **facts)
        self._log.write("verdict", **facts)

    def evidence(
        self, log_dir: str | None, attached: AttachedRank, note: RankNote, document: Mapping[str, Any]
    ) -> None:
        """What was seen of a rank: a note for the launcher, a file for people."""
        self.seen(attached, note)
        if log_dir is not None:
            self._log.do(functools.partial(self._write_evidence, log_dir, attached, document))

    def finish_writing(self) -> None:
        """Wait for what is being written, within bounds; nothing is written any more."""
        self._log.close(_WRITING_S)

    def _write_evidence(self, log_dir: str, attached: AttachedRank, document: Mapping[str, Any]) -> None:
        who = {"rank": attached.rank, "cycle": attached.cycle}
        try:
            path = write_evidence(log_dir, document)
        except OSError as error:
            self._log.write("warning", text=f"the evidence on rank {attached.rank} can't be written: {error.strerror}")
            return
        self._log.write("evidence", **who, file=path, summary=document["summary"], took_s=document["took_s"])

    def seen(self, attached: AttachedRank, note: RankNote) -> None:
        """The note alone."""
        self.tell("evidence", rank=attached.rank, cycle=attached.cycle, note=note.to_dict())

    def news(self, watched: WatchedRank, snapshot: BoardSnapshot) -> None:
        """Log what the board shows for the first time: new timeouts, the first iteration of the cycle."""
        attached = watched.attached
        if snapshot.timeouts_version != watched.logged_timeouts_version:
            watched.logged_timeouts_version = snapshot.timeouts_version
            self._log.write(
                "timeouts",
                rank=attached.rank,
                cycle=attached.cycle,
                version=snapshot.timeouts_version,
                initial_heartbeat=seconds(snapshot.initial_heartbeat_timeout_ns),
                heartbeat=seconds(snapshot.heartbeat_timeout_ns),
                sections={s.name: seconds(s.timeout_ns) for s in snapshot.sections},
                out_of_section=seconds(snapshot.out_of_section_timeout_ns),
            )
        if snapshot.first_iteration_at_ns and not watched.logged_first_iteration:
            watched.logged_first_iteration = True
            self._log.write(
                "first_iteration",
                rank=attached.rank,
                cycle=attached.cycle,
                iteration=snapshot.first_iteration,
                at_ns=snapshot.first_iteration_at_ns,
            )
        if snapshot.first_step_at_ns and not watched.logged_first_step:
            watched.logged_first_step = True
            facts = {"rank": attached.rank, "cycle": attached.cycle, "at_ns": snapshot.first_step_at_ns}
            self._log.write("first_step", **facts)
            self.tell("trains", began_ns=snapshot.first_iteration_at_ns, **facts)

    def progress(self, watched: WatchedRank, snapshot: BoardSnapshot, *, at_once: bool = False) -> None:
        """Log the section events since the last time, if there are enough of them or it is high time."""
        batch = next_batch(watched.board, snapshot, time.monotonic_ns(), at_once=at_once)
        if batch is not None:
            self._log.write("progress", rank=watched.attached.rank, cycle=watched.attached.cycle, **batch)
            taken(watched.board, snapshot)

    def detached(self, attached: AttachedRank, at_ns: int) -> None:
        """A rank has ended its monitoring; its process still runs."""
        who = {"rank": attached.rank, "cycle": attached.cycle, "pid": attached.pid}
        self._log.write("detached", **who)
        self.tell("detached", **who, at_ns=at_ns)

    def rank_gone(self, attached: AttachedRank, snapshot: BoardSnapshot | None) -> None:
        """Log where a rank was when it ended."""
        facts: dict[str, Any] = {"rank": attached.rank, "cycle": attached.cycle, "pid": attached.pid}
        if snapshot is not None:
            facts["iteration"] = snapshot.iteration
            facts["open_sections"] = [s.name for s in snapshot.open_sections]
            facts["last_transition_ns"] = snapshot.last_transition_ns
            facts["shut_down"] = snapshot.closing
        self._log.write("rank_gone", **facts)
