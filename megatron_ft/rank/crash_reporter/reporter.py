"""Reports the stacks, the collectives and the last exception of a rank that hangs or crashes.

* A real-time signal makes `faulthandler` write the stacks of all threads to a memory that the monitor reads. It
  works while another thread holds the GIL, and the interrupted system call goes on.
* A daemon thread sleeps in one read and answers the monitor's question for the collectives in flight and the main
  thread's stack. It never runs unless it is asked.
* An uncaught exception is written to the same memory, and so are the stacks at a signal that ends the process,
  unless the script has enabled `faulthandler` itself.
* The state of Megatron's rerun state machine is written there when the monitoring or the interpreter ends, if the rank
  is about to exit by it (`core.rerun`).

No hook of a train loop runs any of this, and none of it can make a rank fail.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from megatron_ft.core.board import layout
from megatron_ft.core.codec import decode, encode
from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.messages.rank_messages import Answer, Question
from megatron_ft.core.rerun import rerun_entry
from megatron_ft.diagnosis.collectives import Collectives
from megatron_ft.diagnosis.exceptions import (
    EXCEPTION_MARK,
    EXITED_MARK,
    EXITING_MARK,
    LEAVING_MARK,
    THREAD_MARK,
    exception_entry,
    is_peer_loss,
)
from megatron_ft.diagnosis.stacks import REPORTER_THREAD, STAND_IN, Frame, shortened, user_frame
from megatron_ft.ipc.board import Board
from megatron_ft.ipc.files.evidence_files import LIBRARIES
from megatron_ft.ipc.linux.kept_descriptor import KeptDescriptor
from megatron_ft.ipc.linux.polling import has_hung_up
from megatron_ft.ipc.linux.processes import would_end_by
from megatron_ft.rank.crash_reporter.error_file import type_and_message
from megatron_ft.rank.crash_reporter.flight_recorder import collectives, own_rank
from megatron_ft.rank.crash_reporter.rerun_machine import current_rerun_state

_FIRST_SIGNAL = signal.SIGRTMIN + 5
_MAX_QUESTION_BYTES = 256
_MAX_ANSWER_BYTES = 150_000
_MAX_LINE = 1000
_MAX_SAMPLES = 20
_MAX_TRACEBACK = 32_768
_MAX_FRAMES = 300
_BETWEEN_SAMPLES_S = 0.002
_CONTROL_FLOW = (StopIteration, StopAsyncIteration, queue.Empty, queue.Full, BlockingIOError)
"""Exceptions with which programs tell themselves something, not failures."""
_OUTERMOST = ("<module>", "_run_module_as_main")
"""Name of the outermost function while the main thread runs a script, or a module by ``-m``."""

_current: CrashReporter | None = None
"""Last reporter that began in this process."""


class CrashReporter:
    """Reports of one rank. Call ``begin`` when its monitoring begins, ``end`` when it ends."""

    def __init__(self) -> None:
        self._stack = KeptDescriptor(-1)
        self._questions = KeptDescriptor(-1)
        self._signal: int | None = None
        self._socket: socket.socket | None = None
        self._hooks: list[_Hook] = []
        self._enabled_faulthandler = False
        self._pid = 0

    @property
    def _stack_fd(self) -> int:
        return self._stack.number

    def begin(self, board: Board, stack_fd: int, ask_fd: int) -> None:
        """Take ownership of both descriptors, and write to the board how to ask."""
        global _current
        if _current is not None:
            _current.forget()  # of an earlier monitoring in this process
        _current, self._pid = self, os.getpid()
        self._stack, self._questions = KeptDescriptor(stack_fd), KeptDescriptor(ask_fd)
        self._socket = socket.socket(fileno=ask_fd)
        self._signal = _register(stack_fd)
        # the main thread's number first: without a signal it isn't needed
        board.words[layout.W_MAIN_THREAD] = threading.main_thread().ident or 0
        board.words[layout.W_STACK_SIGNAL] = self._signal or 0
        if not faulthandler.is_enabled():
            faulthandler.enable(file=stack_fd, all_threads=True)
            self._enabled_faulthandler = True
        self._hooks = [_Hook(sys, self._stack, _note_end), _Hook(threading, self._stack, _note_thread)]
        thread = threading.Thread(
            target=megatron_ft_crash_reporter, args=(self._socket,), name=REPORTER_THREAD, daemon=True
        )
        with contextlib.suppress(RuntimeError):  # no more threads are allowed: report no collectives
            thread.start()

    def leave(self, error: BaseException) -> None:
        """Report the exception because of which the script ends its monitoring; other ranks may wait for this one."""
        if isinstance(error, Exception):
            _write(self._stack, LEAVING_MARK, error, type(error), error.__traceback__)

    def note_rerun(self) -> None:
        """Report the state of Megatron's rerun state machine, if that is about to end this rank."""
        state = current_rerun_state()
        if state is not None:
            self.note(rerun_entry(state))

    def note(self, text: str) -> None:
        """Write to the stack memory, unless this is a forked child, whose end isn't the rank's."""
        if self._pid == os.getpid() and self._stack.is_ours:
            with contextlib.suppress(OSError, ValueError):
                os.write(self._stack.number, text.encode(errors="replace"))

    def restore_signals(self) -> None:
        """Install the signals for stacks again, if code that resets all signals has reset them."""
        number = self._signal
        if not self._stack.is_ours or number is None or not would_end_by(os.getpid(), number):
            return
        # faulthandler believes that they are installed, and does nothing unless they are unregistered
        faulthandler.unregister(number)
        faulthandler.register(number, file=self._stack.number, all_threads=True)
        if self._enabled_faulthandler:
            faulthandler.disable()
            faulthandler.enable(file=self._stack.number, all_threads=True)

    def end(self) -> None:
        """Stop answering. Stacks can still be collected: a rank may hang after it has ended its monitoring."""
        if self._socket is not None and self._questions.is_ours:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # ends its thread
        elif self._socket is not None:
            self._socket.detach()  # the number belongs to another file by now
        self._socket = None

    def forget(self) -> None:
        """End, and undo what ``end`` leaves: monitoring begins again in this process."""
        self.end()
        if self._stack.number < 0:
            return
        if self._signal is not None:
            faulthandler.unregister(self._signal)
        if self._enabled_faulthandler:
            faulthandler.disable()
        self._unhook()
        self._stack.close()

    def forget_in_child(self) -> None:
        """Disable reports in a forked child (a data-loader worker), whose end isn't the rank's."""
        if self._stack.number >= 0 and self._signal is not None:
            faulthandler.unregister(self._signal)
        if self._stack.number >= 0 and self._enabled_faulthandler:
            faulthandler.disable()
        if self._socket is not None:
            self._questions.close()
            self._socket.detach()
            self._socket = None
        self._unhook()
        self._stack.close()

    def _unhook(self) -> None:
        while self._hooks:
            self._hooks.pop().retire()


class _Hook:
    """Excepthook of a module that first writes an exception to the stack memory, by ``note``.

    Each monitoring has its own. A retired hook only calls the previous one.
    """

    def __init__(self, module: Any, stack: KeptDescriptor, note: Callable[..., None]) -> None:
        self._module, self._note, self._previous = module, note, module.excepthook
        self._stack: KeptDescriptor | None = stack
        module.excepthook = self

    def __call__(self, *arguments: Any) -> None:
        if self._stack is not None:
            self._note(self._stack, *arguments)
        self._previous(*arguments)

    def retire(self) -> None:
        """Write nothing from now on: the descriptor is closed next, and its number may be another file's."""
        self._stack = None
        if self._module.excepthook is self:
            self._module.excepthook = self._previous


def _note_end(
    stack: KeptDescriptor, kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> None:
    """Write the exception that ends the main thread. Other code may call the hook to log one that ends nothing."""
    if ends_main_thread():
        _write(stack, EXCEPTION_MARK, error, kind, where)


def _note_thread(stack: KeptDescriptor, args: threading.ExceptHookArgs) -> None:
    """Write the exception that ended a thread: others may wait for ever for it."""
    if args.exc_value is not None and stack.is_ours:
        name = "of an unknown name" if args.thread is None else args.thread.name
        line = f"thread {name}, which died of {_in_one_line(args.exc_value)}"
        with contextlib.suppress(OSError, ValueError):
            entry = exception_entry(THREAD_MARK, time.monotonic_ns(), line, "")
            os.write(stack.number, entry.encode(errors="replace"))


def _write(
    stack: KeptDescriptor, mark: str, error: BaseException, kind: type[BaseException], where: TracebackType | None
) -> None:
    if not stack.is_ours:
        return
    with contextlib.suppress(OSError, ValueError):
        line = " ".join((type_and_message(kind, error)[: _MAX_LINE // 2] + _from_lost_peer(error)).split())
        text = "".join(traceback.format_exception(kind, error, where))
        entry = exception_entry(mark, time.monotonic_ns(), line[:_MAX_LINE], text[-_MAX_TRACEBACK:])
        os.write(stack.number, entry.encode(errors="replace"))


def _from_lost_peer(error: BaseException) -> str:
    """Return, for the same line, the lost-peer exception from which this one was raised; empty if there is none."""
    seen = {id(error)}
    each: BaseException | None = error
    while each is not None and not is_peer_loss(type_and_message(type(each), each)):
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
        if each is None or id(each) in seen:
            return ""
        seen.add(id(each))
    return "" if each is None or each is error else f" (from {type_and_message(type(each), each)})"


def ends_main_thread() -> bool:
    """Return True if the current excepthook call is the interpreter's report of the main thread's end.

    The interpreter calls the hook when the script's frames are gone: the outermost frame is then that of the hook, or
    of a wrapper. A recipe that logs an exception by the hook runs below a module, or in another thread.
    """
    if threading.get_ident() != threading.main_thread().ident:
        return False
    outermost = sys._getframe(1)
    while outermost.f_back is not None:
        outermost = outermost.f_back
    # code that logs an exception while the interpreter exits (atexit, a destructor) runs below no module, either
    return hasattr(sys, "last_value") and outermost.f_code.co_name not in _OUTERMOST


def _exiting() -> None:
    if _current is not None:
        _current.note(f"\n{EXITING_MARK}\n")


def _exited() -> None:
    if _current is None:
        return
    _current.note(f"\n{EXITED_MARK}\n")
    if not hasattr(sys, "last_value"):  # an exception ends the rank
        _current.note_rerun()


atexit.register(_exited)
# the handler added last runs first, when all threads have ended: to add one then, a private function is needed
getattr(threading, "_register_atexit", lambda _add: None)(lambda: atexit.register(_exiting))


def restore_signals() -> None:
    """Install the signals of the last reporter of this process again, if other code has reset them."""
    if _current is not None:
        _current.restore_signals()


def _register(stack_fd: int) -> int | None:
    """Register a free real-time signal to write the stacks; None if all are in use."""
    for number in range(_FIRST_SIGNAL, signal.SIGRTMAX):
        if would_end_by(os.getpid(), number):
            faulthandler.register(number, file=stack_fd, all_threads=True)
            return number
    return None


def megatron_ft_crash_reporter(questions: socket.socket) -> None:
    """Answer the monitor until the socket is shut down.

    Named like its thread, because stacks name functions only. Samples of the main thread's place are a few milliseconds
    apart.
    """
    kept = KeptDescriptor(questions.fileno())
    while True:
        try:
            asked = questions.recv(_MAX_QUESTION_BYTES)
            # an empty question reads like the end, too
            if not kept.is_ours:
                questions.detach()
                return
            if not asked and has_hung_up(questions.fileno()):
                questions.close()
                return
            question = decode(Question, asked)
            places = main_places(min(question.samples, _MAX_SAMPLES))
            answer = Answer(
                id=question.id,
                collectives=collectives(),
                stack=main_stack(),
                places=places,
                own_rank=own_rank(),
                handling=handled_exception(),
                lost=lost_children(),
            )
            reply = encode(answer)
            if len(reply) > _MAX_ANSWER_BYTES:
                too_long = Collectives(error=f"{len(reply)} bytes are too many")
                reply = encode(Answer(id=question.id, collectives=too_long))
            questions.send(reply, socket.MSG_DONTWAIT)
        except (OSError, ProtocolError, RecursionError, ValueError):
            if questions.fileno() < 0:
                return
            if not kept.is_ours:  # closed by the script: the number is another file's, or will be
                questions.detach()
                return


def main_stack() -> tuple[Frame, ...]:
    """Return the main thread's frames, innermost first; of a deep stack without those of libraries in the middle."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found: list[Frame] = []
    while frame is not None:
        code = frame.f_code
        if code.co_name != STAND_IN:
            found.append(Frame(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return shortened(found, library=LIBRARIES, most=_MAX_FRAMES)


def handled_exception() -> str:
    """Return the exception that the main thread is handling, and where it was raised; empty if there is none.

    A `finally`, an ``except`` or a context manager may wait for ever before the exception ends the rank. Python 3.10
    doesn't tell.
    """
    tell = getattr(sys, "_current_exceptions", None)
    found = None if tell is None else tell().get(threading.main_thread().ident)
    error = found[1] if isinstance(found, tuple) else found  # a tuple up to Python 3.11
    if not isinstance(error, Exception) or isinstance(error, _CONTROL_FLOW):
        return ""
    return _in_one_line(error)


def _in_one_line(error: BaseException) -> str:
    """Return type, message and place of an exception."""
    walked = traceback.walk_tb(error.__traceback__)
    calls = [Frame(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walked]
    place = user_frame(calls[::-1], library=LIBRARIES)
    line = " ".join(type_and_message(type(error), error).split())[: _MAX_LINE // 2]
    return line if place is None else f"{line}, in {place}"


def lost_children() -> tuple[str, ...]:
    """Return the children of `multiprocessing` that have ended and whose own parent, a fork server, has reaped them.

    Nothing is reaped or waited for here: that is the program's.
    """
    process: Any = sys.modules.get("multiprocessing.process")
    found = []
    for child in list(getattr(process, "_children", ())):
        popen: Any = getattr(child, "_popen", None)
        if getattr(popen, "method", "") != "forkserver" or popen.returncode is not None:
            continue
        with contextlib.suppress(OSError, ValueError):
            if select.select([popen.sentinel], [], [], 0)[0]:
                found.append(f"process {child.pid} ({child.name}), which has ended")
    return tuple(found)


def main_places(samples: int) -> tuple[tuple[str, ...], ...]:
    """Return the distinct places of the main thread in ``samples`` samples; more than one means that it moves.

    A place is the list of calls, innermost first, each with its instruction. Python switches threads only between two
    rounds of a loop or as a call begins: two samples of a thread that computes often show the same place.
    """
    found: list[tuple[str, ...]] = []
    for _ in range(samples):
        frame, place = sys._current_frames().get(threading.main_thread().ident or 0), list[str]()
        while frame is not None and len(place) < _MAX_FRAMES:
            file, name = os.path.basename(frame.f_code.co_filename), frame.f_code.co_name
            place.append(f"{file}:{frame.f_lineno} {name} @{frame.f_lasti}")
            frame = frame.f_back
        if tuple(place) not in found:
            found.append(tuple(place))
        time.sleep(_BETWEEN_SAMPLES_S)
    return tuple(found)
