"""End everything that is left of a rank whose launcher died."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from megatron_ft.link.linux.processes import ProcessStat, carries, kill_matching

SWEEP_S = 2.0
_SECOND_LOOK_S = 0.1


def end_orphans(socket_path: str, group: int | None) -> list[ProcessStat]:
    """End every process that the rank of this monitor started, after its launcher died. Return the survivors.

    The rank itself dies of its parent-death signal; its data-loader workers and checkpoint writers don't. Those are
    found by process group or session (``group`` is the number of both; None if no rank was started). Programs that left
    both are found by the monitor's socket in their initial environment: its path is unpredictable, so no other job has
    it.
    """
    marker = f"FT_RANK_MONITOR_IPC_SOCKET={socket_path}".encode()
    own = os.getpid()
    left: list[ProcessStat] = []

    def is_in_group(stat: ProcessStat) -> bool:
        return stat.pid != own and group in (stat.group, stat.session)

    def has_left_it(stat: ProcessStat) -> bool:
        return stat.pid != own and group not in (stat.group, stat.session) and carries(stat.pid, marker)

    def end_others() -> None:
        left.extend(kill_matching(has_left_it, SWEEP_S))
        time.sleep(_SECOND_LOOK_S)
        left.extend(kill_matching(has_left_it, SWEEP_S))

    left += kill_matching(is_in_group, SWEEP_S)
    # reading the environment of a process that is stuck in the kernel blocks, whichever job it belongs to
    others = threading.Thread(target=end_others, daemon=True)
    others.start()
    # a rank whose launcher died while spawning it may appear only now
    time.sleep(_SECOND_LOOK_S)
    left += kill_matching(is_in_group, SWEEP_S)
    others.join(2 * SWEEP_S + _SECOND_LOOK_S)
    return left


def remove_run_directory(socket_path: str) -> None:
    """Remove this monitor's socket, those of the dead launcher, and the directory if no other socket is left."""
    directory = os.path.dirname(socket_path)
    for path in (socket_path, os.path.join(directory, "launcher.sock"), os.path.join(directory, "keeper.sock")):
        with contextlib.suppress(OSError):
            os.unlink(path)
    with contextlib.suppress(OSError):
        # no process needs the other files of the launcher now
        if not any(name.endswith(".sock") for name in os.listdir(directory)):
            import shutil

            shutil.rmtree(directory, ignore_errors=True)
