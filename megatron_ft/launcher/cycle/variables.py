"""What this node's ranks find in their environment beside what torch gives to each."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from megatron_ft.core.run_ahead import WATCH_VARIABLE
from megatron_ft.core.timeouts.raised import RaisedTimeouts
from megatron_ft.launcher.base.command_line import CommandLine
from megatron_ft.launcher.cycle import reference_names
from megatron_ft.launcher.cycle.control_socket import ControlSocket
from megatron_ft.launcher.monitors.monitors import Monitors
from megatron_ft.launcher.spawn.rank_environment import rank_environment

__all__ = ["RankVariables", "shared_environment"]


def shared_environment(line: CommandLine) -> dict[str, str]:
    """The same for all ranks of this node."""
    options = line.options
    watches = options.watch_collectives != "off"
    return rank_environment(os.environ, reference_names=options.reference_names == "on", watches=watches)


class RankVariables:
    """Of each rank in a cycle; ``cycle_info`` is None without ``--ft-cycle-info-dir``."""

    def __init__(
        self,
        line: CommandLine,
        *,
        monitors: Monitors,
        control: ControlSocket,
        cycle_info: reference_names.CycleInfo | None,
    ) -> None:
        self.raised_timeouts = RaisedTimeouts()
        self._monitors = monitors
        self._control = control
        self._watch = "off" if line.options.watch_collectives == "off" else "on"
        self._infra_rank = reference_names.infra_rank(line, os.environ)
        self._cycle_info = cycle_info

    def complete(self, envs: Mapping[int, dict[str, str]], cycle: int) -> None:
        """Add them to the environments of the ranks (by local rank) that are about to start."""
        now = time.time()
        for local_rank, env in envs.items():
            env.update(self._of_rank(local_rank, cycle))
            env.update(reference_names.variables(cycle, now, self._infra_rank))
            if self._cycle_info is not None:
                env["NVRX_CURRENT_CYCLE_INFO"] = self._cycle_info.current
        if self._cycle_info is not None and envs[0].get("GROUP_RANK") == "0":
            self._cycle_info.begun(cycle, nodes=int(envs[0]["GROUP_WORLD_SIZE"]))

    def _of_rank(self, local_rank: int, cycle: int) -> dict[str, str]:
        return {
            "FT_RANK_MONITOR_IPC_SOCKET": self._monitors.socket_path(local_rank),
            "FT_LAUNCHER_IPC_SOCKET": self._control.path,
            "FT_CYCLE": str(cycle),
            WATCH_VARIABLE: self._watch,
            **self.raised_timeouts.environment(cycle),
        }
