"""The monitor's command line; argparse would cost every rank's monitor another half megabyte."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from megatron_ft.ipc.attached_rank import AttachedRank
from megatron_ft.ipc.config.yaml_file import FaultToleranceConfig


class Settings(NamedTuple):
    """The arguments of a monitor's start; see ``ipc.monitor_process.spawn``."""

    listen_fd: int
    socket_path: str
    local_rank: int
    config: FaultToleranceConfig
    launcher_fd: int | None
    log_dir: str | None
    log_max_bytes: int
    run_id: str
    parent: int
    observe_only: bool
    attached: AttachedRank | None


def parse(argv: Sequence[str]) -> Settings:
    """Read ``--name value`` pairs; they come from our own ``spawn``, so a mistake here is ours."""
    assert len(argv) % 2 == 0, argv
    given = dict(zip(argv[::2], argv[1::2], strict=True))
    attached = given.pop("--attached", None)
    launcher_fd = given.pop("--launcher-fd", None)
    settings = Settings(
        listen_fd=int(given.pop("--listen-fd")),
        socket_path=given.pop("--socket"),
        local_rank=int(given.pop("--local-rank")),
        config=FaultToleranceConfig.from_dict(json.loads(given.pop("--config"))),
        launcher_fd=None if launcher_fd is None else int(launcher_fd),
        log_dir=given.pop("--log-dir", None),
        log_max_bytes=int(given.pop("--log-max-bytes", "0")),
        run_id=given.pop("--run-id", ""),
        parent=int(given.pop("--parent")),
        observe_only=given.pop("--observe-only", "no") == "yes",
        attached=None if attached is None else AttachedRank(**json.loads(attached)),
    )
    assert not given, given
    return settings
