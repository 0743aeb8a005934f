"""Callbacks for PyTorch Lightning (``lightning`` and ``pytorch_lightning``), for jobs run with ``ft_launcher``.

    trainer = Trainer(..., callbacks=[FaultToleranceSectionsCallback(autoresume=True, calculate_timeouts=True)])

:class:`FaultToleranceCallback` sends heartbeats, :class:`FaultToleranceSectionsCallback` opens and closes sections;
use one of them. Names, arguments and files are those of ``nvidia_resiliency_ext.ptl_resiliency``. They
monitor ``trainer.fit`` only: ``validate``, ``test`` and ``predict`` need no launcher.
"""

from __future__ import annotations

from megatron_ft.integrations.lightning_faults import SimulatedFaultParams
from megatron_ft.integrations.lightning_heartbeats import FaultToleranceCallback
from megatron_ft.integrations.lightning_sections import FaultToleranceSectionsCallback

__all__ = ["FaultToleranceCallback", "FaultToleranceSectionsCallback", "SimulatedFaultParams"]
