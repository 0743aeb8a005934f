"""Starting a rank monitor: a new interpreter by argv, never a fork of a process that may hold torch."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ft.core.config.config import ConfigValues
from megatron_ft.core.config.kinds import DEFAULT_LOG_MAX_BYTES
from megatron_ft.ipc.attached_rank import AttachedRank
from megatron_ft.ipc.linux.isolated import isolated_command
from megatron_ft.ipc.linux.open_files import give_back_to


@dataclass(frozen=True, kw_only=True)
class MonitorOptions:
    """What all monitors of a node have alike; ``log_dir`` None: no logs are written."""

    config: ConfigValues
    log_dir: str | None = None
    run_id: str = ""
    observe_only: bool = False
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
    """Start the monitor of one local rank; it serves at once, because the caller already listens.

    With ``launcher_fd`` (an end of a socket pair) it belongs to a launcher: it reports there, ignores the terminal's
    signals, and if the launcher dies it ends its rank and everything the rank started. Without one it just watches one
    rank until it is terminated. With ``observe_only`` it only reports hung ranks, and terminates none.
    """
    fds = [listen_fd]
    argv = isolated_command("megatron_ft.monitor")
    argv += ["--listen-fd", str(listen_fd), "--socket", socket_path, "--local-rank", str(local_rank)]
    argv += ["--config", json.dumps(options.config.to_dict()), "--run-id", options.run_id, "--parent", str(os.getpid())]
    if launcher_fd is not None:
        argv += ["--launcher-fd", str(launcher_fd)]
        fds.append(launcher_fd)
    if options.log_dir is not None:
        argv += ["--log-dir", options.log_dir, "--log-max-bytes", str(options.log_max_bytes)]
    if options.observe_only:
        argv += ["--observe-only", "yes"]
    if attached is not None:
        argv += ["--attached", json.dumps(attached._asdict())]
        fds += attached.fds
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if launcher_fd is not None else None,
        pass_fds=fds,
        env=None if env is None else dict(env),
        start_new_session=True,
        close_fds=True,
    )
    give_back_to(process.pid)
    return process
