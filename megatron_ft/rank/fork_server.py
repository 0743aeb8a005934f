"""The fork server: one process per node that has imported what ranks need, runs nothing, and is forked for each.

``python -m megatron_ft.rank.fork_server --fd N --launcher PID [--import MODULE]``: N is one end of a socket
pair, the launcher holds the other. It takes two messages: "spawn" forks a rank, "grow" forks a server that imports
more. The end of the connection ends it. What it forks are children of the launcher, made by forking twice:
the launcher is child subreaper, and adopts what the process in between leaves.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from megatron_ft.core.preload import FORK_SERVER_NAME, RankCommand
from megatron_ft.ipc.prctl import die_with_parent
from megatron_ft.ipc.wire import Channel, ChannelClosedError, Message, close_fds
from megatron_ft.rank import forked_rank
from megatron_ft.rank.forked_rank import Interrupts, NewRank
from megatron_ft.rank.huge_pages import collapse_memory
from megatron_ft.rank.preloading import Wanted, import_all, own_changes, touches_cuda, why_unfit
from megatron_ft.rank.process_title import set_command_line

__all__ = ["ForkServer", "main"]

_TITLE = "ft_launcher: fork server"
_IDLE_MS: float = 1000.0
_PATIENCE_S = 3600.0
_DONE = object()


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Serve, and in the children that are forked: be the rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--launcher", type=int, required=True)
    parser.add_argument("--room", help="ignored: ranks write their command line over this one's memory")
    parser.add_argument("--import", dest="modules", action="append", default=[])
    options = parser.parse_args(argv)
    _belong_to(options.launcher)
    forked_rank.remember_first_in_path()
    interrupts = _be_deaf_to_interrupts()
    set_command_line([_TITLE], name=FORK_SERVER_NAME)
    server = ForkServer(Channel(socket.socket(fileno=options.fd)), launcher_pid=options.launcher, interrupts=interrupts)
    rank = server.run([Wanted(name) for name in options.modules])
    forked_rank.become(rank)
    forked_rank.run(rank)


def _belong_to(launcher_pid: int) -> None:
    """Live as long as the launcher, and out of reach of its terminal."""
    die_with_parent()
    if os.getppid() != launcher_pid:
        os._exit(0)
    if os.getsid(0) != os.getpid():
        os.setsid()


def _be_deaf_to_interrupts() -> Interrupts:
    """Ignore SIGINT from here on; returns what the ranks get back.

    It is blocked, too: one that comes to a rank before it has its handler back would be lost, and waits so.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # a launcher without standard streams: what a rank is given must not take their numbers
    os.close(fd)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    return Interrupts(signal.signal(signal.SIGINT, signal.SIG_IGN), frozenset(mask))


class ForkServer:
    """One generation of it; ``grow`` makes the next."""

    def __init__(self, channel: Channel, *, launcher_pid: int, interrupts: Interrupts) -> None:
        self._channel = channel
        self._interrupts = interrupts
        self._launcher_pid = launcher_pid
        self._environment = dict(os.environ)
        """As the launcher has it; what imports change in it is applied to each rank's."""
        self._script_dir: str | None = None
        self._expected: dict[str, str] = {}

    def run(self, first: Sequence[Wanted]) -> NewRank:
        """Serve until the end of this process; returns only in a child that is to be a rank."""
        imports = list(first)
        while True:
            if not self._import(imports):
                os._exit(0)
            child = self._serve()
            if isinstance(child, NewRank):
                return child
            imports = child

    def _import(self, wanted: Sequence[Wanted]) -> bool:
        """Import, and tell the launcher what came of it; whether this process is fit to serve."""
        if self._script_dir is not None:
            forked_rank.put_first_in_path(self._script_dir)
        result = import_all(wanted, lambda name: self._tell({"type": "importing", "name": name}), self._expected)
        reason = result.reason or ("it touched CUDA" if touches_cuda() else why_unfit())
        if reason:
            self._tell({"type": "unfit", "spoiled_by": result.spoiled_by, "reason": reason})
            return False
        gc.freeze()  # a collection in a rank would else copy every page that it looks at
        self._tell(
            {
                "type": "ready",
                "imported": result.imported,
                "failed": result.failed,
                "modules": sorted(self._found_later()),
            }
        )
        return True

    def _found_later(self) -> set[str]:
        """Top-level names of what was imported, but for what lies in the script's own directory."""
        # __main__ is whoever runs: it says nothing about a __main__.py beside the script
        names = {name.partition(".")[0] for name in sys.modules} - {"__main__", *sys.builtin_module_names}
        origins = {name: getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None) for name in names}
        places = {name: os.path.dirname(origin) for name, origin in origins.items() if origin is not None}
        here = {self._script_dir}
        return {name for name in names if not here & {places.get(name), os.path.dirname(places.get(name, ""))} - {""}}

    def _tell(self, message: Mapping[str, Any]) -> None:
        try:
            # a launcher that is stopped reads nothing, and is waited for; one that is gone ends us
            self._channel.send(message, timeout_s=_PATIENCE_S)
        except ChannelClosedError:
            os._exit(0)

    def _serve(self) -> NewRank | list[Wanted]:
        """Answer requests; returns only in a child, with what it is to do."""
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN)
        idle_work = collapse_memory()
        wait_ms: float | None = _IDLE_MS
        while True:
            if not poller.poll(wait_ms):
                # nobody has asked for anything: make the next fork faster, and look again after each little step
                wait_ms = 0 if next(idle_work, _DONE) is None else None
                continue
            wait_ms = _IDLE_MS
            try:
                received = self._channel.receive()
            except ChannelClosedError:
                os._exit(0)
            begun: list[_Begun | OSError] = []
            for message, fds in received:
                child = self._begin(message, fds, begun)
                if child is not None:
                    return child
                close_fds(fds)
            # all were begun before the first is waited for: what is in between forks while we fork the next
            for each in begun:
                self._finish(each)

    def _begin(
        self, message: Message, fds: tuple[int, ...], begun: list[_Begun | OSError]
    ) -> NewRank | list[Wanted] | None:
        """Begin what a message asks for; returns only in the new process, with what it is to do."""
        if message["type"] not in ("spawn", "grow"):
            return None
        try:
            fork = _begin_fork()
        except OSError as error:
            begun.append(error)
            return None
        if fork is not None:
            begun.append(fork)
            return None
        for other in begun:
            if isinstance(other, _Begun):
                os.close(other.read_fd)
        if message["type"] == "spawn":
            return self._new_rank(message, fds)
        self._start_over(fds[0])
        with open(fds[1], closefd=False) as file:
            order = json.load(file)
        close_fds(fds[1:])
        self._script_dir, self._expected = order["script_dir"], order["expected"]
        return [Wanted(name, origin) for name, origin in order["modules"]]

    def _finish(self, begun: _Begun | OSError) -> None:
        """Tell the launcher the number of a process that was begun, or why there is none."""
        try:
            if isinstance(begun, OSError):
                raise begun
            self._tell({"type": "forked", "pid": _finish_fork(begun)})
        except OSError as error:
            self._tell({"type": "failed", "reason": str(error)})

    def _new_rank(self, message: Message, fds: tuple[int, ...]) -> NewRank:
        self._channel.close()  # by its object: collected later, it would close a number that is another's by then
        go_fd, stdin, stdout, stderr, *report = fds
        env = dict(message["env"])
        # what a module sets while it is imported, it would set in the rank; the rank's own settings win
        for name, value in own_changes(self._environment).items():
            if env.get(name) == self._environment.get(name):
                if value is None:
                    env.pop(name, None)
                else:
                    env[name] = value
        command = message["command"]
        return NewRank(
            argv=message["argv"],
            command=RankCommand(command["script"], command["is_module"], tuple(command["arguments"])),
            cwd=message["cwd"],
            env=env,
            go_fd=go_fd,
            streams=(stdin, stdout, stderr),
            report_fd=report[0] if report else None,
            launcher_pid=self._launcher_pid,
            interrupts=self._interrupts,
        )

    def _start_over(self, fd: int) -> None:
        """In the child: be a server of our own, on a connection of our own."""
        os.setsid()
        self._channel.close()
        self._channel = Channel(socket.socket(fileno=fd))
        # the launcher says "go" when it has heard of us from the process that forked us: then it is our parent
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        poller.poll()
        try:
            self._channel.receive()
        except ChannelClosedError:
            os._exit(0)
        die_with_parent()
        if os.getppid() != self._launcher_pid:
            os._exit(0)


class _Begun(NamedTuple):
    """A process in between: it forks the one that is wanted, writes its number to a pipe, and ends."""

    pid: int
    read_fd: int


def _begin_fork() -> _Begun | None:
    """Begin to fork a process whose parent ends, so that the launcher adopts it; None in that process.

    Raises:
        OSError: no process can be made.
    """
    read_fd, write_fd = os.pipe()
    try:
        between = os.fork()
    except OSError:
        close_fds((read_fd, write_fd))
        raise
    if between != 0:
        os.close(write_fd)
        return _Begun(between, read_fd)
    try:
        pid = os.fork()
    except OSError:
        os._exit(1)
    if pid != 0:
        try:
            os.write(write_fd, pid.to_bytes(4, "little"))
        finally:
            os._exit(0)  # also if the server is gone, and nobody reads
    close_fds((read_fd, write_fd))
    return None


def _finish_fork(begun: _Begun) -> int:
    """The number of the process; the launcher is its parent from here on.

    Raises:
        OSError: it could not be made.
    """
    number = os.read(begun.read_fd, 4)
    os.close(begun.read_fd)
    os.waitpid(begun.pid, 0)
    if len(number) < 4:
        raise OSError("the process could not be forked")
    return int.from_bytes(number, "little")


if __name__ == "__main__":
    main()
