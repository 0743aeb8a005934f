"""Reports the stacks, the collectives and the last exception of a rank that hangs or crashes.

* A real-time signal makes `faulthandler` write the stacks of all threads to a memory that the monitor reads. It
  works while another thread holds the GIL, and the interrupted system call goes on.
* A daemon thread sleeps in one read and answers the monitor's question for the collectives in flight and the main
  thread's stack. It never runs unless it is asked.
* An uncaught exception is written to the same memory, and so are the stacks at a signal that ends the process,
  unless the script has enabled `faulthandler` itself.
* The state of Megatron's rerun state machine is written there when the monitoring or the interpreter ends, if the rank
  is about to exit by it (`link.base.rerun`).

No hook of a train loop runs any of this, and none of it can make a rank fail.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import itertools
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from msgspec.structs import replace

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
from megatron_ft.errors import ProtocolError
from megatron_ft.link.base import layout
from megatron_ft.link.base.codec import decode, encode
from megatron_ft.link.base.rerun import EXIT_STATES, MODULE, RerunState, rerun_entry
from megatron_ft.link.board import Board
from megatron_ft.link.files.evidence_files import LIBRARIES
from megatron_ft.link.linux.kept_descriptor import KeptDescriptor
from megatron_ft.link.linux.processes import has_hung_up, would_end_by
from megatron_ft.link.messages.rank_messages import Answer, Question
from megatron_ft.rank.base import agreement
from megatron_ft.rank.crash_reporter.error_file import type_and_message
from megatron_ft.rank.crash_reporter.flight_recorder import collectives

_FIRST_SIGNAL = signal.SIGRTMIN + 5
_MAX_QUESTION_BYTES = 256
_MAX_ANSWER_BYTES = 150_000
_MAX_LINE = 1000
_MAX_SAMPLES = 20
_MAX_TRACEBACK = 32_768
_MAX_FRAMES, _MAX_PLACE = 300, 60
_BETWEEN_SAMPLES_S = 0.002
_CONTROL_FLOW = (StopIteration, StopAsyncIteration, queue.Empty, queue.Full, BlockingIOError)
"""Exceptions with which programs tell themselves something, not failures."""
_OUTERMOST = ("<module>", "_run_module_as_main")
"""Name of the outermost function while the main thread runs a script, or a module by ``-m``."""
_OWN = {
    "WILL_RERUN_FROM_CHECKPOINT": "checkpoint_requested",
    "RERUNNING_AGAIN_FROM_CHECKPOINT": "restart_again_requested",
    "RERUNNING_IN_PLACE": "rerun_requested",
    "RERUNNING_FROM_CHECKPOINT": "suspicious_node",
}
"""Attribute of the machine that is set only on a rank whose result was rejected, by the state."""

_current: CrashReporter | None = None
"""Last reporter that began in this process."""


class CrashReporter:
    """Reports of one rank. Call ``begin`` when its monitoring begins, ``end`` when it ends."""

    def __init__(self) -> None:
        self.stack = KeptDescriptor(-1)
        self._questions = KeptDescriptor(-1)
        self.signal: int | None = None
        self._socket: socket.socket | None = None
        self._hooks: list[_Hook] = []
        self.enabled_faulthandler = False
        self._pid = 0

    def begin(self, board: Board, stack_fd: int, ask_fd: int) -> None:
        """Take ownership of both descriptors, and write to the board how to ask."""
        global _current
        if _current is not None:
            _current.forget()  # of an earlier monitoring in this process
        _current, self._pid = self, os.getpid()
        self.stack, self._questions = KeptDescriptor(stack_fd), KeptDescriptor(ask_fd)
        self._socket = socket.socket(fileno=ask_fd)
        numbers = range(_FIRST_SIGNAL, signal.SIGRTMAX)
        self.signal = next((number for number in numbers if would_end_by(os.getpid(), number)), None)  # a free one
        if self.signal is not None:
            faulthandler.register(self.signal, file=stack_fd, all_threads=True)
        # the main thread's number first: without a signal it isn't needed
        board.words[layout.W_MAIN_THREAD] = threading.main_thread().ident or 0
        board.words[layout.W_STACK_SIGNAL] = self.signal or 0
        if not faulthandler.is_enabled():
            faulthandler.enable(file=stack_fd, all_threads=True)
            self.enabled_faulthandler = True
        self._hooks = [_Hook(sys, self.stack, _note_end), _Hook(threading, self.stack, _note_thread)]
        thread = threading.Thread(
            target=megatron_ft_crash_reporter, args=(self._socket,), name=REPORTER_THREAD, daemon=True
        )
        with contextlib.suppress(RuntimeError):  # no more threads are allowed: report no collectives
            thread.start()

    def leave(self, error: BaseException) -> None:
        """Report the exception because of which the script ends its monitoring; other ranks may wait for this one."""
        if isinstance(error, Exception):
            _write(self.stack, LEAVING_MARK, error)

    def note_rerun(self) -> None:
        """Report the state of Megatron's rerun state machine, if that is about to end this rank."""
        state = current_rerun_state()
        if state is not None:
            self.note(rerun_entry(state))

    def note(self, text: str) -> None:
        """Write to the stack memory, unless this is a forked child, whose end isn't the rank's."""
        if self._pid == os.getpid():
            _put(self.stack, text)

    def end(self) -> None:
        """Stop answering. Stacks can still be collected: a rank may hang after it has ended its monitoring."""
        if self._socket is not None and self._questions.is_ours:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # ends its thread
        elif self._socket is not None:
            self._socket.detach()  # the number belongs to another file by now
        self._socket = None

    def forget(self, *, in_child: bool = False) -> None:
        """End, and undo what ``end`` leaves: monitoring begins again in this process.

        ``in_child``: this is a forked child (a data-loader worker), whose end isn't the rank's.
        """
        if in_child and self._socket is not None:
            self._questions.close()
            self._socket.detach()
            self._socket = None
        self.end()
        if self.stack.number >= 0 and self.signal is not None:
            faulthandler.unregister(self.signal)
        if self.stack.number >= 0 and self.enabled_faulthandler:
            faulthandler.disable()
        while self._hooks:
            self._hooks.pop().retire()
        self.stack.close()


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


def _note_end(stack: KeptDescriptor, _kind: object, error: BaseException, _where: object) -> None:
    """Write the exception that ends the main thread. Other code may call the hook to log one that ends nothing."""
    if ends_main_thread():
        _write(stack, EXCEPTION_MARK, error)


def _note_thread(stack: KeptDescriptor, args: threading.ExceptHookArgs) -> None:
    """Write the exception that ended a thread: others may wait for ever for it."""
    if args.exc_value is not None:
        name = "of an unknown name" if args.thread is None else args.thread.name
        line = f"thread {name}, which died of {_in_one_line(args.exc_value)}"
        _put(stack, exception_entry(THREAD_MARK, time.monotonic_ns(), line, ""))


def _write(stack: KeptDescriptor, mark: str, error: BaseException) -> None:
    line = " ".join((type_and_message(error)[: _MAX_LINE // 2] + _from_lost_peer(error)).split())
    text = "".join(traceback.format_exception(error))
    _put(stack, exception_entry(mark, time.monotonic_ns(), line[:_MAX_LINE], text[-_MAX_TRACEBACK:]))


def _put(stack: KeptDescriptor, text: str) -> None:
    if stack.is_ours:
        with contextlib.suppress(OSError, ValueError):
            os.write(stack.number, text.encode(errors="replace"))


def _from_lost_peer(error: BaseException) -> str:
    """Return, for the same line, the lost-peer exception from which this one was raised; empty if there is none."""
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and not any(each is known for known in chain):
        chain.append(each)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    texts = [*map(type_and_message, chain)]
    lost = next((text for text in texts if is_peer_loss(text)), texts[0])
    return "" if lost == texts[0] else f" (from {lost})"


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


def _exits(mark: str) -> None:
    if _current is not None:
        _current.note(f"\n{mark}\n")
        if mark == EXITED_MARK and not hasattr(sys, "last_value"):  # an exception ends the rank
            _current.note_rerun()


atexit.register(_exits, EXITED_MARK)
# the handler added last runs first, when all threads have ended: to add one then, a private function is needed
getattr(threading, "_register_atexit", lambda *_: None)(atexit.register, _exits, EXITING_MARK)


def current_rerun_state() -> RerunState | None:
    """Return the state with which Megatron is about to exit; None if it trains, or this process doesn't use it."""
    try:
        machine: Any = getattr(sys.modules.get(MODULE), "_GLOBAL_RERUN_STATE_MACHINE", None)
        state = getattr(getattr(machine, "state", None), "name", None)
        if state not in EXIT_STATES or getattr(getattr(machine, "mode", None), "name", None) != "VALIDATE_RESULTS":
            return None
        node, device = getattr(machine, "suspicious_node", None), getattr(machine, "suspicious_device", None)
        return RerunState(
            state=state,
            own=bool(getattr(machine, _OWN[state], False)),
            node=node if isinstance(node, str) else "",
            device=device if type(device) is int and device >= 0 else None,
        )
    except Exception:  # noqa: BLE001 - whatever stands under that name: no rank may fail because of it
        return None


def restore_signals() -> None:
    """Install the signals of the last reporter in this process again, if code that resets all has reset them."""
    number = None if _current is None else _current.signal
    if _current is None or not _current.stack.is_ours or number is None or not would_end_by(os.getpid(), number):
        return
    # faulthandler believes that they are installed, and does nothing unless they are unregistered
    faulthandler.unregister(number)
    faulthandler.register(number, file=_current.stack.number, all_threads=True)
    if _current.enabled_faulthandler:
        faulthandler.disable()
        faulthandler.enable(file=_current.stack.number, all_threads=True)


def megatron_ft_crash_reporter(questions: socket.socket) -> None:
    """Answer the monitor until the socket is shut down.

    Named like its thread, because stacks name functions only. Samples of the main thread's place are a few milliseconds
    apart.
    """
    kept = KeptDescriptor(questions.fileno())
    while questions.fileno() >= 0:
        is_lost = not kept.is_ours
        if is_lost:  # closed by the script: the number is another file's, or will be
            questions.detach()
            break
        with contextlib.suppress(OSError, ProtocolError, RecursionError, ValueError):
            asked = questions.recv(_MAX_QUESTION_BYTES)
            is_lost = not kept.is_ours
            if is_lost:
                continue
            if not asked and has_hung_up(questions.fileno()):  # an empty question reads like the end, too
                questions.close()
                break
            question = decode(Question, asked)
            answer = Answer(
                id=question.id,
                places=main_places(min(question.samples, _MAX_SAMPLES)),
                collectives=collectives(),
                stack=main_stack(),
                own_rank=agreement.rank() if agreement.has_process_group() else None,
                handling=handled_exception(),
            )
            questions.send(_reply(answer), socket.MSG_DONTWAIT)


def _reply(answer: Answer) -> bytes:
    """Return an answer as it is sent: without what makes it too long."""
    reply = encode(answer)
    if len(reply) > _MAX_ANSWER_BYTES:  # collectives of large groups name all ranks: the earliest of each is enough
        earliest = {each.group: each for each in reversed(answer.collectives.in_flight)}
        few = replace(answer.collectives, in_flight=tuple(reversed(earliest.values())))
        reply = encode(replace(answer, collectives=few))
    if len(reply) > _MAX_ANSWER_BYTES:
        too_long = Collectives(error=f"{len(reply)} bytes are too many")
        reply = encode(Answer(id=answer.id, collectives=too_long))
    return reply


def main_stack() -> tuple[Frame, ...]:
    """Return the main thread's frames, innermost first; of a deep stack without those of libraries in the middle."""
    calls = ((frame.f_code, line) for frame, line in _main_calls())
    found = [Frame(code.co_filename, line, code.co_name) for code, line in calls if code.co_name != STAND_IN]
    return shortened(found, library=LIBRARIES, most=_MAX_FRAMES)


def _main_calls() -> Iterable[tuple[FrameType, int]]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return () if frame is None else traceback.walk_stack(frame)


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
    line = " ".join(type_and_message(error).split())[: _MAX_LINE // 2]
    return line if place is None else f"{line}, in {place}"


def main_places(samples: int) -> tuple[tuple[str, ...], ...]:
    """Return the distinct places of the main thread in ``samples`` samples; more than one means that it moves.

    A place is the list of calls, innermost first, each with its instruction. Python switches threads only between two
    rounds of a loop or as a call begins: two samples of a thread that computes often show the same place.
    """
    found: list[tuple[str, ...]] = []
    for _ in range(samples):
        place = [
            f"{os.path.basename(frame.f_code.co_filename)}:{line} {frame.f_code.co_name} @{frame.f_lasti}"
            for frame, line in itertools.islice(_main_calls(), _MAX_PLACE)
        ]
        if tuple(place) not in found:
            found.append(tuple(place))
        time.sleep(_BETWEEN_SAMPLES_S)
    return tuple(found)
