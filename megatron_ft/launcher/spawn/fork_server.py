"""The fork server, seen by the launcher: a process that imports what ranks share, and forks them."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from megatron_ft.core.errors import FaultToleranceError, ProtocolError
from megatron_ft.core.messages.fork_server_messages import (
    FROM_SERVER,
    CheckFiles,
    Failed,
    FilesChecked,
    Forked,
    FromServer,
    ImportActs,
    ImportsReady,
    Spawn,
    ToServer,
    Unfit,
)
from megatron_ft.ipc.linux.process_setup import restore_file_limit_of
from megatron_ft.ipc.linux.processes import send_signal, wait_gone
from megatron_ft.ipc.wire import Channel, ChannelClosedError
from megatron_ft.launcher.base.rank_environment import with_startup
from megatron_ft.launcher.processes import process_tree
from megatron_ft.link.reactor import Priority, Reactor
from megatron_ft.run_ahead.orders import FORK_SERVER_NAME, RUN_AHEAD_VARIABLE, Orders

_ANSWER_S = 3.0
"""Longest wait for an answer: a fork takes milliseconds; a slower server is stopped, or stuck."""
_LONGEST_END_S = 5.0

_Answer = TypeVar("_Answer", FilesChecked, Forked)


class ServerError(FaultToleranceError):
    """Raised if a fork server doesn't do what it is asked."""


class ServerProcess:
    """The fork server, a child of the launcher."""

    def __init__(self, orders: Orders) -> None:
        """Start the server.

        Raises:
            OSError: it can't be started.
        """
        self.orders = orders
        self._reactor: Reactor | None = None
        self.is_ready = False
        self.is_gone = False
        self.unfit: str | None = None
        """Why ranks can't be forked from it; None if they can."""
        self.acted: ImportActs | None = None
        """The import that has ended it; None without one."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.channel = Channel(ours, takes_fds=False)
        self.channel_fd = ours.fileno()
        try:
            with theirs:
                self._process = self._start(theirs.fileno())
        except OSError:
            self.channel.close()
            raise
        self.pid = self._process.pid
        restore_file_limit_of(self.pid)
        self.pidfd = os.pidfd_open(self.pid)

    def _start(self, fd: int) -> subprocess.Popen[bytes]:
        python_path = self.orders.environment.get("PYTHONPATH")
        orders = {
            "fd": fd,
            "launcher": os.getpid(),
            "python_path": python_path,
            "command": self.orders.command,
            "preload": self.orders.preload,
            "left_out": self.orders.left_out,
            "ends_first": self.orders.ends_first,
        }
        env = {
            **self.orders.environment,
            RUN_AHEAD_VARIABLE: json.dumps(orders),
            "PYTHONPATH": with_startup(python_path),
        }
        # what imports print is written by each rank
        with open(os.memfd_create("ft_stdout"), "wb") as out, open(os.memfd_create("ft_stderr"), "wb") as err:
            return subprocess.Popen(
                self.orders.command, env=env, stdout=out, stderr=err, pass_fds=[fd], start_new_session=True
            )

    def watch(self, reactor: Reactor, *, on_message: Callable[[], None], on_end: Callable[[], None]) -> None:
        """Have these called by the event loop until ``end``."""
        self._reactor = reactor
        reactor.watch(self.channel_fd, on_message)
        reactor.watch(self.pidfd, on_end, Priority.DEATH)

    def read(self) -> list[FromServer]:
        """Return new messages: the imports are done, or one acts; a module to preload was left out."""
        messages: list[FromServer] = []
        try:
            if self.channel.fileno() >= 0:
                messages = self._receive()
        except (ChannelClosedError, ProtocolError):
            self._lose()  # it is ending anyway: its pidfd reports that
        for message in messages:
            if isinstance(message, ImportsReady):
                self.is_ready = True
            elif isinstance(message, ImportActs):
                self.acted, self.is_ready = message, False
            elif isinstance(message, Unfit):
                self.unfit = message.reason
        return messages

    def fork_ranks(self, requests: Sequence[tuple[Mapping[str, str], Sequence[int]]]) -> list[int]:
        """Return the PID of a new rank for each request (variables, and descriptors of go, standard output and error).

        The ranks are children of the launcher by then. Each waits for a byte at go, or for its end, at which it ends.

        Raises:
            ServerError: not all ranks can be made.
        """
        pids = [answer.pid for answer in self._ask([(Spawn(env), fds) for env, fds in requests], Forked)]
        for pid in pids:
            try:
                process_tree.exit_code_unreaped(pid)
            except ChildProcessError:
                self._lose()
                raise ServerError(f"process {pid}, which it names as a rank, is no child of the launcher") from None
        return pids

    def changed_file(self) -> str | None:
        """Return a file of the user that was imported, and has changed; None without one.

        Raises:
            ServerError: the server is gone or doesn't answer.
        """
        (answer,) = self._ask([(CheckFiles(), ())], FilesChecked)
        return answer.changed

    def kill(self) -> None:
        """Kill the server, stopped or not; it needs no cleanup."""
        if not self.is_gone:
            send_signal(self.pidfd, signal.SIGKILL)

    def end(self, known_children: Callable[[], Collection[int]]) -> int:
        """Kill the server and its leftovers, reap it, and return its exit code as in ``subprocess``.

        Leftovers are children of imported modules, and ranks just forked and not reported: children of the launcher
        that aren't in ``known_children``. A server that is stuck in the kernel is left behind, and counts as killed.
        """
        assert not self.is_gone
        if self._reactor is not None:
            self._reactor.unwatch(self.pidfd)
            if self.channel.fileno() >= 0:
                self._reactor.unwatch(self.channel_fd)
        self.kill()
        wait_gone(self.pidfd, _LONGEST_END_S)
        process_tree.end_strays(self.pid, FORK_SERVER_NAME, known_children)
        code = process_tree.exit_code_unreaped(self.pid)
        if code is not None:
            process_tree.reap(self.pid)
        # otherwise Popen would wait for a number that may be reused by then
        self._process.returncode = -signal.SIGKILL if code is None else code
        self.is_gone, self.is_ready = True, False
        self.channel.close()
        os.close(self.pidfd)
        return self._process.returncode

    def _ask(self, requests: Sequence[tuple[ToServer, Sequence[int]]], kind: type[_Answer]) -> list[_Answer]:
        """Return an answer of that kind to each request. A server that is gone or answers otherwise is killed.

        Raises:
            ServerError: the server is gone, answers otherwise, or reports a failure.
        """
        heard: list[FromServer] = []
        try:
            if self.is_gone or process_tree.is_stopped(self.pid):
                raise TimeoutError("it is stopped")
            for request, fds in requests:
                self.channel.send(request, fds)
            poller = select.poll()
            poller.register(self.channel_fd, select.POLLIN)
            while len(heard) < len(requests):
                if not poller.poll(_ANSWER_S * 1e3):
                    raise TimeoutError(f"no answer for {_ANSWER_S:g} s")
                heard += self._receive()
            for answer in heard:
                if isinstance(answer, Failed):
                    raise ServerError(answer.reason)
            answers = [answer for answer in heard if isinstance(answer, kind)]
            if not len(requests) == len(heard) == len(answers):
                raise ProtocolError("it answers something else")
        except (ChannelClosedError, ProtocolError, TimeoutError) as error:
            self._lose()
            raise ServerError(str(error)) from None
        return answers

    def _receive(self) -> list[FromServer]:
        """Return the messages that are complete now.

        Raises:
            ChannelClosedError: the server is gone.
            ProtocolError: a message can't be read; the channel is closed.
        """
        try:
            return [FROM_SERVER.parse(message) for message, _ in self.channel.receive()]
        except ProtocolError:
            self.channel.close()
            raise

    def _lose(self) -> None:
        if self.channel.fileno() < 0 and self._reactor is not None:
            self._reactor.unwatch(self.channel_fd)  # the number of the descriptor may soon be reused
        self.kill()


def why_fresh(argv: Sequence[str]) -> str | None:
    """Return why ranks with this command can't be forked; None if they can. torch builds it: interpreter, "-u", ..."""
    if argv[0] != sys.executable:
        return "the ranks aren't run by this Python"
    if len(argv) < 3 or argv[1] != "-u":
        return "the ranks' interpreter has options of its own"
    if argv[2].startswith("-") and (argv[2] != "-m" or len(argv) < 4):
        return "the script isn't a file"
    return None
