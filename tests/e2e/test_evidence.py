"""Collecting evidence from a process, whatever state it is in: bounded, and without a signal it isn't ready for."""

from __future__ import annotations

import builtins
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from megatron_ft.diagnosis.exceptions import is_peer_loss, last_words
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.link.base.layout import CLOSING, W_CLOSING, W_LAST_HEARTBEAT, W_STACK_SIGNAL
from megatron_ft.link.board import Board, create_memory
from megatron_ft.link.facts.shared import RankHung
from megatron_ft.link.linux.processes import read_stat
from megatron_ft.monitor.collect_evidence import STACK_MEMORY, collect
from megatron_ft.monitor.process import AttachedRank
from tests.support.agents import hung
from tests.support.launching import ROOT, wait_until

BOUND_S = 2.0
SCRIPT = """
import ctypes, os, signal, sys, threading, time
sys.path.insert(0, {root!r})
from megatron_ft.link.base.layout import W_STACK_SIGNAL
from megatron_ft.link.board import Board
from megatron_ft.rank.crash_reporter.reporter import CrashReporter, restore_signals
board, stack_fd, ask_fd = Board(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
reporter = CrashReporter()
def begin():
    reporter.begin(board, stack_fd, ask_fd)
    ready()
def ready():
    os.write(int(sys.argv[4]), b"x")
def sleeping():
    time.sleep(100)
def spinning():
    while True:
        pass
def holding():
    ctypes.PyDLL(None).poll(None, 0, 100_000)
    ctypes.PyDLL(None).poll(None, 0, 100_000)
"""


@dataclass
class Subject:
    process: subprocess.Popen[bytes]
    attached: AttachedRank
    board: Board

    def collect(
        self, *, passive: bool = False, bound_s: float = BOUND_S, verdict: RankHung | None = None
    ) -> tuple[RankSnapshot, dict[str, Any]]:
        deadline_ns = time.monotonic_ns() + round(bound_s * 1e9)
        evidence = collect(
            self.attached,
            self.board,
            self.board.snapshot(),
            verdict,
            local_rank=0,
            passive=passive,
            deadline_ns=deadline_ns,
        )
        return evidence.note, json.loads(json.dumps(evidence.packed()))

    def written(self) -> str:
        return os.pread(self.attached.stack_fd, 1 << 20, 0).decode()


class Subjects:
    """Starts processes with a reporter, as a monitor would have it; ends them."""

    def __init__(self) -> None:
        self.all: list[Subject] = []

    def start(self, body: str) -> Subject:
        board_fd, stack_fd = create_memory(), os.memfd_create(STACK_MEMORY)
        board = Board(board_fd)
        board.initialise(
            cycle=0, rank=3, pid=0, start_ns=time.monotonic_ns(), warmup_iterations=0, sections={"step": 1.0}
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ready, tell = os.pipe()
        fds = (board_fd, stack_fd, theirs.fileno(), tell)
        command = [sys.executable, "-c", SCRIPT.format(root=str(ROOT)) + body, *map(str, fds)]
        process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        theirs.close()
        os.close(tell)
        pidfd = os.pidfd_open(process.pid)
        wake_fd = os.eventfd(0)
        subject = Subject(
            process, AttachedRank(board_fd, wake_fd, pidfd, stack_fd, ours.detach(), process.pid, 3, 0), board
        )
        self.all.append(subject)
        poller = select.poll()
        poller.register(ready, select.POLLIN)
        assert poller.poll(30_000)
        assert os.read(ready, 1) == b"x", "the subject didn't get ready"
        os.close(ready)
        time.sleep(0.1)  # it is a call or two away from where it shall be
        return subject

    def end(self) -> None:
        for subject in self.all:
            subject.process.kill()
            subject.process.wait()
            subject.board.close()
            for fd in subject.attached.fds:
                os.close(fd)


@pytest.fixture
def subjects() -> Iterator[Subjects]:
    factory = Subjects()
    yield factory
    factory.end()


def functions(document: dict[str, Any]) -> list[str]:
    """Of the main thread, innermost first."""
    return [frame[2] for thread in document["threads"] if thread["main"] for frame in thread["frames"]]


SIGNALS_RESET = """
reporter.begin(board, stack_fd, ask_fd)
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_DFL)
restore_signals()
ready()
sleeping()
"""


@pytest.mark.parametrize(
    ("body", "what", "answers"),
    [
        ("begin(); sleeping()", "sleeping", True),
        ("begin(); spinning()", "spinning", True),
        ("begin(); reporter.end(); sleeping()", "sleeping", False),
        (SIGNALS_RESET, "sleeping", True),
    ],
)
def test_note_names_the_python_function_that_the_rank_is_in(
    subjects: Subjects, body: str, what: str, answers: bool
) -> None:
    """Also if it has ended its monitoring, or reset and restored its signals."""
    note, document = subjects.start(body).collect()
    assert (functions(document)[:1], document["stacks_by"]) == ([what], "faulthandler")
    assert note.frame.endswith(f" {what}")
    assert note.has_collectives == answers  # it told that it has none
    assert note.is_busy == (what == "spinning")


def test_a_rank_that_holds_the_lock_writes_its_stack_and_tells_no_collectives(subjects: Subjects) -> None:
    subject = subjects.start("begin(); holding()")
    began = time.monotonic()
    note, document = subject.collect()
    assert time.monotonic() - began < BOUND_S + 1.0
    assert functions(document)[:1] == ["holding"]
    assert not note.has_collectives
    assert "didn't answer" in document["missing"][0]


@pytest.mark.parametrize(
    ("waits", "verdict"), [("os.kill(os.getpid(), signal.SIGSTOP)", None), ("signal.pause()", hung())]
)
def test_a_stopped_rank_is_read_where_it_was_stopped_and_stays_so(
    subjects: Subjects, waits: str, verdict: RankHung | None
) -> None:
    """So does a hung one that the signal wakes: it would train on, and so would those that wait for it."""
    subject = subjects.start(f"begin(); {waits}; spinning()")
    note, document = subject.collect(verdict=verdict)
    assert note.is_stopped == (verdict is None)
    assert functions(document) == ["<module>"]
    wait_until(lambda: (stat := read_stat(subject.attached.pid)) is not None and stat.state == "T", 5.0)


def test_a_rank_that_stands_in_the_middle_of_its_dump_is_waited_for(subjects: Subjects) -> None:
    """It shares its processor with others: its handler may be put off for longer than two looks take."""
    subject = subjects.start("""
begin()
head = f"Current thread 0x{threading.main_thread().ident:016x} (most recent call first):\\n"
def handler(number):
    for line in (head, '  File "a.py", line 1 in inner\\n', '  File "b.py", line 2 in <module>\\n'):
        os.write(stack_fd, line.encode())
        ctypes.CDLL(None).usleep(100_000)
handler_in_c = ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)
ctypes.CDLL(None).signal(board.words[W_STACK_SIGNAL], handler_in_c)
sleeping()
""")
    _, document = subject.collect(verdict=hung())
    assert functions(document) == ["inner", "<module>"]


def test_a_rank_without_a_handler_gets_no_signal(subjects: Subjects) -> None:
    """A real-time signal that nobody handles ends a process."""
    subject = subjects.start("ready(); sleeping()")
    for number in (0, 1, signal.SIGRTMIN + 5, 2**63):
        subject.board.words[W_STACK_SIGNAL] = number
        note, document = subject.collect(bound_s=0.2)
        assert document["threads"] == []
        assert any("no handler" in text for text in document["missing"])
        assert not note.gone
    assert subject.process.poll() is None


@pytest.mark.parametrize("passive", [False, True])
def test_evidence_reads_no_proc_file_that_takes_a_lock_of_the_rank_and_sends_no_signal_where_it_is_passive(
    subjects: Subjects, monkeypatch: pytest.MonkeyPatch, passive: bool
) -> None:
    """The memory map of a process that is stuck in a driver may be locked, and ``cmdline``, say, waits for it."""
    subject = subjects.start("begin(); sleeping()")
    opened = set()
    real_open = builtins.open

    def open_(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path).startswith(f"/proc/{subject.attached.pid}/"):
            opened.add(os.path.basename(path))
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", open_)
    note, document = subject.collect(passive=passive)
    assert note.has_collectives
    assert (subject.written() == "") == passive
    assert document["process"]["state"] == "S"
    assert {"stat", "wchan"} <= opened <= {"children", "stat", "status", "wchan"}


def test_an_exception_is_written_and_a_child_s_isn_t(subjects: Subjects) -> None:
    body = """
reporter.begin(board, stack_fd, ask_fd)
if os.fork() == 0:
    reporter.forget(in_child=True)
    ready()
    raise KeyError("of the child")
os.wait()
def failing():
    raise ValueError("two\\nlines")
failing()
"""
    subject = subjects.start(body)
    assert subject.process.wait(10) == 1
    words = last_words(subject.written())
    assert words.error == "ValueError: two lines"
    assert words.where.endswith(" failing")
    assert "of the child" not in subject.written()


def test_rank_that_has_raised_has_ended_though_another_thread_still_sends_heartbeats(subjects: Subjects) -> None:
    subject = subjects.start(
        """
begin()
threading.Thread(target=sleeping).start()
def failing():
    raise ValueError("mine")
failing()
"""
    )
    wait_until(lambda: "mine" in subject.written(), 10)
    subject.board.words[W_LAST_HEARTBEAT] = time.monotonic_ns()
    wait_until(lambda: "_shutdown" in functions(subject.collect()[1]), 10)
    note, _ = subject.collect()
    assert note.raised == "ValueError: mine"
    assert note.raised_s > 0


FAILING = """
def failing():
    raise ValueError("logged")
threading.excepthook = lambda a: sys.excepthook(a.exc_type, a.exc_value, a.exc_traceback)
try: failing()
"""
LOGGED = {
    "by the main thread": "except ValueError: sys.excepthook(*sys.exc_info())",
    "after its frames have ended": "except ValueError as error: kept = error\nsys.excepthook(type(kept), kept, None)",
    "by threading's hook": "except ValueError: threading.Thread(target=failing).start(); time.sleep(0.5)",
}
ENDS = ("os._exit(7)", "sys.exit(7)", "raise KeyError('mine')")


@pytest.mark.parametrize(
    ("how", "ends"), [*((how, ENDS[-1]) for how in LOGGED), *(("by the main thread", end) for end in ENDS[:-1])]
)
def test_exception_that_is_only_logged_by_the_excepthook_is_no_end(subjects: Subjects, how: str, ends: str) -> None:
    subject = subjects.start(f"begin()\n{FAILING}{LOGGED[how]}\n{ends}")
    subject.process.wait(10)
    assert last_words(subject.written()).error == ("KeyError: 'mine'" if "mine" in ends else "")
    assert "logged" not in subject.written()


WRAPPERS = {
    "function": "def theirs(*args): ours(*args)\nsys.excepthook = theirs",
    "partial": "import functools; sys.excepthook = functools.partial(ours)",
    "one that stays": """sys.excepthook = lambda *args: ours(*args)
import socket
for _ in range(2):
    earlier, reporter, stack_fd = reporter, CrashReporter(), os.dup(stack_fd)
    reporter.begin(board, stack_fd, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)[1].detach())""",
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_exception_that_ends_the_main_thread_is_written_once_through_a_wrapped_excepthook(
    subjects: Subjects, wrapper: str
) -> None:
    subject = subjects.start(f"begin()\nours = sys.excepthook\n{WRAPPERS[wrapper]}\nraise ValueError('mine')")
    assert subject.process.wait(10) == 1
    assert last_words(subject.written()).error == "ValueError: mine"
    assert subject.written().count("\nValueError: mine\n") == 2  # in one line, and in the traceback


AT_EXIT = "import atexit; atexit.register({})"
LOST = "begin()\ntry: raise RuntimeError('gloo: Timed out waiting 5000ms')\n"
CRASHES = f"{AT_EXIT.format('os.abort')}\nbegin()\nraise ValueError('mine')"


@pytest.mark.parametrize(
    ("body", "code", "error", "fatal"),
    [
        (f"{LOST}except RuntimeError as lost: raise ValueError('mine') from lost", 1, "ValueError", "a peer"),
        (f"{LOST}except RuntimeError as lost: raise ValueError('mine')", 1, "ValueError", "a peer"),
        (f"{LOST}except RuntimeError as lost: raise ValueError('mine') from None", 1, "ValueError", ""),
        (
            f"begin()\n{AT_EXIT.format('lambda: sys.excepthook(ValueError, ValueError(1), None)')}\nsys.exit(3)",
            3,
            "",
            "",
        ),
        ("begin()\nctypes.string_at(0)", -signal.SIGSEGV, "", "Fatal Python error: Segmentation fault"),
        (CRASHES, -signal.SIGABRT, "ValueError", "Fatal Python error: Aborted"),
        ("import faulthandler; faulthandler.enable(); begin(); ctypes.string_at(0)", -signal.SIGSEGV, "", ""),
    ],
)
def test_the_last_words_of_a_process_are_those_of_its_end(
    subjects: Subjects, body: str, code: int, error: str, fatal: str
) -> None:
    """Lost peers are a cause; what is logged at the exit is no end; a script's own faulthandler stays its own."""
    subject = subjects.start(body)
    assert subject.process.wait(10) == code
    words = last_words(subject.written())
    assert words.error.split(": mine")[0] == error
    assert is_peer_loss(words.error) == (fatal == "a peer")
    assert words.fatal_error.startswith(fatal) if "Fatal" in fatal else not words.fatal_error
    assert words.exited == (code > 0)


@pytest.mark.parametrize("closing", [True, False])
def test_exception_with_which_a_script_ended_its_monitoring_is_reported_in_a_hang_only(
    subjects: Subjects, closing: bool
) -> None:
    body = """
reporter.begin(board, stack_fd, ask_fd)
def failing():
    raise ValueError("mine")
try:
    failing()
except ValueError as error:
    reporter.leave(error)
    reporter.end()
ready()
sleeping()
"""
    subject = subjects.start(body)
    subject.board.words[W_CLOSING] = CLOSING if closing else 0
    note, _ = subject.collect()
    assert note.raised == ("ValueError: mine" if closing else "")
    assert last_words(subject.written()).error == ""


LOSES = """
import multiprocessing
def child(act):
    pid = os.fork()
    if not pid:
        act()
        os._exit(0)
    return pid
def ended(pid):
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
def kill():
    os.kill(os.getpid(), signal.SIGKILL)
def live():
    os.close(keeps)
    ended(child(kill))
    os.write(tell, b"x")
    os.read(alive, 1)  # as long as the subject lives
(alive, keeps), (known, tell) = os.pipe(), os.pipe()
for act in (lambda: None, lambda: os._exit(3), kill):
    ended(child(act))
child(live)
os.read(known, 1)
begin()
multiprocessing.SimpleQueue().get()
"""


def test_the_processes_that_a_rank_has_lost_are_told(subjects: Subjects) -> None:
    """Its own and those of its processes; one that ended well isn't lost."""
    subject = subjects.start(LOSES)
    note, document = subject.collect()
    ends = [re.fullmatch(r"process \d+ \(python[\d.]*\), which (.*)", each) for each in note.lost]
    assert [end and end[1] for end in ends] == ["exited with code 3", "was killed by SIGKILL", "was killed by SIGKILL"]
    assert note.waits_for_process
    assert document["summary"].startswith(f"rank 3: waits for its {note.lost[0]}, and 2 more, in ")
    assert document["lost"] == list(note.lost)
