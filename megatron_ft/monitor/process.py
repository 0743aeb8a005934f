"""Command line of a rank monitor: written by its starter, read by the monitor.

A monitor is a new interpreter, never a fork of a process that may hold torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron_ft.config.config import ConfigValues
from megatron_ft.config.kinds import DEFAULT_LOG_MAX_BYTES
from megatron_ft.link.linux.process_setup import isolated_command, restore_file_limit

if TYPE_CHECKING:
    import subprocess  # at run time only where a monitor is started: it reads this file, too


class AttachedRank(NamedTuple):
    """The rank of a monitor, as handed to a replacement monitor; the descriptors stay the caller's."""

    board_fd: int
    wake_fd: int
    pidfd: int
    stack_fd: int
    """Memory file in which the rank writes its stacks on request, and its last exception."""
    ask_fd: int
    """Socket on which the rank answers questions about its collectives."""
    pid: int
    rank: int
    cycle: int

    @property
    def fds(self) -> tuple[int, ...]:
        """All descriptors, in the order of the fields."""
        return self[:5]


@dataclass(frozen=True, kw_only=True)
class MonitorOptions:
    """Options common to all monitors of a node; ``log_dir`` None: no logs."""

    config: ConfigValues
    log_dir: str | None = None
    run_id: str = ""
    observe_only: bool = False
    asks_first: bool = False
    log_max_bytes: int = DEFAULT_LOG_MAX_BYTES


def spawn(
    *,
    listen_fd: int,
    socket_path: str,
    local_rank: int,
    options: MonitorOptions,
    launcher_fd: int | None = None,
    attached: AttachedRank | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start the monitor of one local rank. It serves at once, because the caller already listens.

    With ``launcher_fd`` (an end of a socket pair), the monitor belongs to a launcher: it reports there, ignores the
    terminal's signals, and if the launcher dies it ends its rank and everything the rank started. Without one it
    watches one rank until it is terminated. With ``observe_only`` it reports hung ranks and terminates none. With
    ``asks_first`` it asks the launcher before it reports a hang, whether the timeout was learned or not.
    """
    import subprocess

    fds = [listen_fd]
    argv = isolated_command("megatron_ft.monitor")
    argv += ["--listen-fd", str(listen_fd), "--socket", socket_path, "--local-rank", str(local_rank)]
    taken_over = None if attached is None else attached._asdict()
    given = {**vars(options), "config": options.config.for_ranks(), "attached": taken_over}
    argv += ["--run-id", given.pop("run_id"), "--parent", str(os.getpid()), "--options", json.dumps(given)]
    if launcher_fd is not None:
        argv += ["--launcher-fd", str(launcher_fd)]
        fds.append(launcher_fd)
    if attached is not None:
        fds += attached.fds
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if launcher_fd is not None else None,
        pass_fds=fds,
        env=env,
        start_new_session=True,
    )
    restore_file_limit(process.pid)
    return process


@dataclass(frozen=True, kw_only=True)
class MonitorSettings(MonitorOptions):
    """Parsed command line of a monitor: the arguments of ``spawn``, and the caller's PID."""

    listen_fd: int
    socket_path: str
    local_rank: int
    launcher_fd: int | None
    parent: int
    attached: AttachedRank | None


def parse(argv: Sequence[str]) -> MonitorSettings:
    """Read the ``--name value`` pairs of ``spawn``. argparse would cost every monitor another half megabyte."""
    assert len(argv) % 2 == 0, argv
    given = dict(zip(argv[::2], argv[1::2], strict=True))
    launcher_fd = given.pop("--launcher-fd", None)
    options = json.loads(given.pop("--options"))
    options["config"] = ConfigValues.from_dict(options["config"])
    attached = options.pop("attached")
    settings = MonitorSettings(
        **options,
        listen_fd=int(given.pop("--listen-fd")),
        socket_path=given.pop("--socket"),
        local_rank=int(given.pop("--local-rank")),
        launcher_fd=None if launcher_fd is None else int(launcher_fd),
        run_id=given.pop("--run-id"),
        parent=int(given.pop("--parent")),
        attached=None if attached is None else AttachedRank(**attached),
    )
    assert not given, given
    return settings
