"""Collect evidence on a rank before it is terminated, within a bound.

No call here, to the rank or to the kernel, can block this process beyond the bound. The verdict is final before
collecting starts and isn't changed by it: collecting may itself wake the rank, since a signal interrupts a sleep in C.
On a rank that may run on, evidence is collected ``passive``-ly: the rank gets only a question, which a thread of its
own answers.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable

from msgspec.structs import replace

from megatron_ft.diagnosis.collectives import Collectives
from megatron_ft.diagnosis.evidence import RankEvidence, open_sections, with_board
from megatron_ft.diagnosis.exceptions import LEAVING_MARK, CrashOutput, last_words, lost_threads
from megatron_ft.diagnosis.rank_snapshot import (
    RankSnapshot,
    is_in_checkpoint_write,
    is_in_library,
    is_past_its_script,
    is_waiting_for_process,
    lost_process,
    place,
    stack_wait,
)
from megatron_ft.diagnosis.stacks import (
    Frame,
    ThreadStack,
    main_stack,
    parse_faulthandler,
    user_frame,
)
from megatron_ft.errors import ProtocolError
from megatron_ft.link.base import layout
from megatron_ft.link.base.codec import decode, encode
from megatron_ft.link.base.layout import BoardSnapshot
from megatron_ft.link.base.wording import begins
from megatron_ft.link.board import Board
from megatron_ft.link.facts.shared import RankHung
from megatron_ft.link.files.evidence_files import LIBRARIES
from megatron_ft.link.linux import proc
from megatron_ft.link.linux.processes import is_gone, read_stat, send_signal, signal_main_thread
from megatron_ft.link.messages.rank_messages import Answer, Question
from megatron_ft.monitor.process import AttachedRank

STACK_MEMORY = "megatron_ft_stacks"
"""Name of the memory file in which a rank writes its stacks."""
_STACK_S = 1.0
_ANSWER_S = 0.8
"""Longest wait for an answer. Even on a starved machine a thread gets the GIL within milliseconds, if at all."""
_LOOK_AGAIN_S = 0.004
_LOOK_SOON_S = 0.0005
_MAX_DUMP_BYTES = 1 << 20
_MOST_DUMPED = 100
_LAST_EVENTS = 40


def collect(
    attached: AttachedRank,
    board: Board,
    snapshot: BoardSnapshot | None,
    verdict: RankHung | None,
    *,
    local_rank: int,
    passive: bool,
    deadline_ns: int,
) -> RankEvidence:
    """Collect the evidence on one rank, until ``deadline_ns`` (monotonic) at the latest."""
    began_ns = time.monotonic_ns()
    missing: list[str] = []
    facts = proc.process_facts(attached.pid)
    lost = proc.lost_processes(attached.pid)
    probe = Probe(attached, snapshot, deadline_ns, freeze=verdict is not None and not passive)
    # collectives first: the signal for the stacks may wake the rank, which then enters the next collective
    answer = probe.ask(facts.state, missing)
    collectives = answer.collectives
    # a process is in uninterruptible sleep for moments, in a page fault or a write: a single "D" proves nothing
    first, later = facts.state, read_stat(attached.pid)
    second = first if later is None else later.state
    state, is_busy = second if first == "D" else first, first == second == "R"
    stacks, source, frames = probe.all_stacks(state, missing, answer.stack, passive=passive)
    told, inner = user_frame(frames, library=LIBRARIES), frames[0] if frames else None
    text = os.pread(attached.stack_fd, _MAX_DUMP_BYTES, 0).decode(errors="replace")
    words = _last_words(text, None if is_past_its_script(frames) else snapshot)
    note = RankSnapshot(
        rank=attached.rank,
        local_rank=local_rank,
        host=socket.gethostname(),
        pid=attached.pid,
        found_hung=verdict is not None,
        state=state,
        is_busy=is_busy,
        has_stack=bool(frames),
        frame=words.where or (board.place() if told is None else str(told)),
        inner="" if inner is None else str(inner),
        waits_in=stack_wait(frames),
        is_saving=is_in_checkpoint_write(frames),
        is_in_library=is_in_library(frames),
        has_collectives=collectives.error in ("", *_HARMLESS),
        in_flight=collectives.in_flight,
        enqueued=collectives.enqueued,
        gone=is_gone(attached.pidfd),
        handling="" if words.error else answer.handling,
        raised=words.error,
        raised_s=max(0, began_ns - words.raised_at_ns) / 1e9 if words.error else 0.0,
        lost=(*(lost_process(*each) for each in lost), *lost_threads(text)),
        waits_for_process=is_waiting_for_process(frames),
        own_rank=None if answer.own_rank == attached.rank else answer.own_rank,
    )
    note = with_board(note, snapshot, began_ns)
    return RankEvidence(
        summary=f"rank {note.rank}: {place(note)}",
        note=note,
        cycle=attached.cycle,
        verdict=verdict,
        open_sections=open_sections(snapshot, began_ns),
        last_events=_last_events(board, snapshot, began_ns),
        process=facts,
        stacks_by=source,
        threads=tuple(replace(each, main=each.frames is frames) for each in stacks),
        collectives=collectives,
        missing=tuple(missing),
        took_s=round((time.monotonic_ns() - began_ns) / 1e9, 4),
    )


def _last_words(text: str, snapshot: BoardSnapshot | None) -> CrashOutput:
    """Return the exception that ends the rank or ended its monitoring; an empty `CrashOutput` if the rank went on."""
    words = last_words(text, library=LIBRARIES)
    if not words.error and snapshot is not None and snapshot.closing:
        words = last_words(text, library=LIBRARIES, mark=LEAVING_MARK)
    moved_ns = 0 if snapshot is None else max(snapshot.last_transition_ns, snapshot.last_heartbeat_ns)
    return words if words.error and words.raised_at_ns >= moved_ns else CrashOutput()


_HARMLESS = ("there is no process group", "torch.distributed isn't imported")
"""Reasons for missing collectives that are no sign of trouble."""


class Probe:
    """Asks one rank for its stacks and its collectives, within one deadline."""

    def __init__(
        self, attached: AttachedRank, snapshot: BoardSnapshot | None, deadline_ns: int, *, freeze: bool
    ) -> None:
        """``freeze``: stop the rank once it has written its stacks, which may have woken it; for a rank about to be
        ended."""
        self._freeze = freeze
        self._attached = attached
        self._snapshot = snapshot
        self._deadline_ns = deadline_ns

    def left_s(self) -> float:
        """Return the seconds until the deadline."""
        return max(0.0, (self._deadline_ns - time.monotonic_ns()) / 1e9)

    def all_stacks(
        self, state: str, missing: list[str], told: tuple[Frame, ...], *, passive: bool
    ) -> tuple[list[ThreadStack], str, tuple[Frame, ...]]:
        """Return the stacks of all threads, their source, and the main thread's stack.

        ``told`` is the main thread's stack as the rank itself answered, if it did.
        """
        stacks = [] if passive else self._own_stacks(state, missing)
        main = 0 if self._snapshot is None else self._snapshot.main_thread
        frames = main_stack(stacks, main)
        # the rank writes at most a hundred threads, the main thread last, and the innermost hundred calls of each
        if told and not (0 < len(frames) < _MOST_DUMPED or is_gone(self._attached.pidfd)):
            return [ThreadStack(main, told)], "a thread of its own", told
        return stacks, "faulthandler", frames

    def _own_stacks(self, state: str, missing: list[str]) -> list[ThreadStack]:
        """Return the stacks written by the rank's faulthandler; empty if it has no handler or doesn't get to it."""
        number = 0 if self._snapshot is None else self._snapshot.stack_signal
        if not signal.SIGRTMIN <= number <= signal.SIGRTMAX or not proc.handles(self._attached.pid, number):
            missing.append("stacks by faulthandler: the rank has no handler (ready) for it")
            return []
        if not proc.has_open(self._attached.pid, STACK_MEMORY):
            missing.append("stacks by faulthandler: the rank has closed the file for them")
            return []  # its number may belong to a file of the script by now
        begin = os.fstat(self._attached.stack_fd).st_size
        deaf = proc.blocking_threads(self._attached.pid, number)
        is_stopped = state in ("T", "t")
        if is_stopped:
            # The signal must be pending for the main thread before any code runs again; another thread might be slower.
            # Afterwards the rank is stopped again: evidence on other ranks is still to be collected.
            signal_main_thread(self._attached.pid, self._attached.pidfd, number)
            send_signal(self._attached.pidfd, signal.SIGCONT)
        else:
            send_signal(self._attached.pidfd, number)
        text = self._wait_dump(number, begin, deaf, _LOOK_SOON_S if is_stopped or self._freeze else _LOOK_AGAIN_S)
        if is_stopped or self._freeze:
            send_signal(self._attached.pidfd, signal.SIGSTOP)
        if not text:
            missing.append("stacks by faulthandler: the rank didn't get to its handler")
        return parse_faulthandler(text)

    def _wait_dump(self, number: int, begin: int, deaf: set[int], interval_s: float) -> str:
        """Return what the handler writes from offset ``begin`` on; ``deaf`` threads blocked its signal before.

        A rank that shares its processor may pause in the middle of a dump. The dump is complete once no thread is in
        the handler.
        """

        def written() -> bytes:
            return os.pread(self._attached.stack_fd, _MAX_DUMP_BYTES, begin)

        def whole() -> bool:
            return bool(written()) and proc.blocking_threads(self._attached.pid, number) <= deaf

        self._until(whole, min(_STACK_S, self.left_s()), interval_s)
        return written().decode(errors="replace")

    def ask(self, state: str, missing: list[str], *, samples: int = 0) -> Answer:
        """Ask the rank's own thread for the collectives in flight and the main thread's stack.

        ``samples``: number of samples of the main thread's place. If the rank doesn't answer, the answer says why.
        """
        question = Question(time.monotonic_ns(), samples)
        if state in ("T", "t"):
            return _no_answer(question, "the rank is stopped")
        found: list[Answer] = []
        why = "the rank didn't answer: probably a thread holds the GIL"
        with socket.socket(fileno=os.dup(self._attached.ask_fd)) as channel:

            def answered() -> bool:
                found.extend(_receive(channel, question.id))
                return bool(found)

            try:
                channel.send(encode(question), socket.MSG_DONTWAIT)
                self._until(answered, min(_ANSWER_S, self.left_s()), _ANSWER_S, channel)
            except OSError as error:
                why = f"the rank can't be asked any more ({error.strerror})"
        answer = found[0] if found else _no_answer(question, why)
        if answer.collectives.error:
            missing.append(f"collectives: {answer.collectives.error}")
        return answer

    def _until(
        self, done: Callable[[], bool], bound_s: float, interval_s: float, channel: socket.socket | None = None
    ) -> None:
        """Poll until ``done()``, the bound (seconds) or the end of the rank."""
        poller = select.poll()
        poller.register(self._attached.pidfd, select.POLLIN)
        if channel is not None:
            poller.register(channel.fileno(), select.POLLIN)
        end = time.monotonic() + bound_s
        while not done() and (left := end - time.monotonic()) > 0 and not is_gone(self._attached.pidfd):
            poller.poll(1e3 * min(left, interval_s))


def _no_answer(question: Question, why: str) -> Answer:
    return Answer(id=question.id, collectives=Collectives(error=why))


def _receive(channel: socket.socket, number: int) -> list[Answer]:
    """Return the answer to this question if it has arrived, and drop answers to earlier ones."""
    while True:
        try:
            raw = channel.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not raw:
            raise OSError(0, "it has ended its monitoring")
        try:
            answer = decode(Answer, raw)
        except ProtocolError:
            continue
        if answer.id == number:
            return [answer]


def _last_events(board: Board, snapshot: BoardSnapshot | None, now_ns: int) -> tuple[tuple[float, str], ...]:
    """Return recent events as (seconds before ``now_ns``, description), oldest first."""
    if snapshot is None:
        return ()
    names = [section.name for section in snapshot.sections]
    _, words = board.ring_words(max(0, snapshot.ring_head - _LAST_EVENTS), snapshot.ring_head)
    found = []
    for at_ns, kind, index, value in layout.ring_events(words):
        name = names[index] if index < len(names) else f"section {index}"
        what = {
            layout.EVENT_START: f"{name} begins",
            layout.EVENT_END: f"{name} ends",
            layout.EVENT_HEARTBEAT: "heartbeat",
            layout.EVENT_ITERATION: begins(value),
        }.get(kind)
        if what is not None:  # None: a stray write
            found.append(((now_ns - at_ns) / 1e9, what))
    return tuple(found)
