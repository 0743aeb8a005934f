"""The client for scripts that import nvidia-resiliency-ext's: ours, with what such scripts also rely on.

Megatron-LM's unmodified hooks report no iterations and start no simulated fault: this client does both for them.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from megatron_ft.link.base.intervals import WARMUP_ITERATIONS
from megatron_ft.rank.client import client
from megatron_ft.rank.faults import simulated

_MEGATRON_ARGUMENTS = "megatron.training.global_vars"
_MEGATRON_LOOP = "megatron.training.training"


class RankMonitorClient(client.RankMonitorClient):
    """`RankMonitorClient` of ``rank.client.client``, with the reference's attributes and defaults."""

    rank_monitor_socket = launcher_connector = timeouts_calc = chkpt_manager = None
    """Attributes of nvidia-resiliency-ext's client, for code that reads them; always None here."""
    iter_idx = 0
    _leaves_out_open_sections = True
    """Megatron's unmodified hooks select "setup", which is still open where a finished job is resumed."""

    def __init__(self) -> None:
        """Create a client without any I/O."""
        super().__init__()
        self.logger = logging.getLogger("nvidia_resiliency_ext.fault_tolerance.rank_monitor_client")
        self._args: Any = None

    def init_workload_monitoring(self, num_warmup_iters: int | None = None) -> None:
        """Connect to this rank's monitor; without a number, the first 5 iterations are the warm-up."""
        super().init_workload_monitoring(WARMUP_ITERATIONS if num_warmup_iters is None else num_warmup_iters)
        pretrain = getattr(sys.modules.get(_MEGATRON_LOOP), "pretrain", None)
        code = getattr(pretrain, "__code__", None)
        if code is not None and "maybe_setup_simulated_fault" not in code.co_names:  # no version since 0.16 calls it
            simulated.start_described(client=lambda: self)

    def start_section(self, section: str) -> None:
        """Open a section, after reporting the iteration in Megatron-LM's train loop."""
        if self._args is None:  # Megatron-LM has none yet
            self._args = getattr(sys.modules.get(_MEGATRON_ARGUMENTS), "_GLOBAL_ARGS", None)
        iteration = getattr(self._args, "curr_iteration", None)
        if type(iteration) is int and iteration >= 0 and self._recorder is not None:
            self._recorder.iteration(iteration)
        super().start_section(section)
