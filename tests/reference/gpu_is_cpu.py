"""``pytest -p gpu_is_cpu``: what tests of nvidia-resiliency-ext need besides, where there is no GPU.

* A Lightning trainer's ``accelerator="gpu"`` is the CPU.
* Who plays the launcher receives our messages: the reference's ``IpcConnector`` takes pickles, which no rank of ours
  sends.
* Tests that newer versions skip, because these callbacks are deprecated there, are run.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import nvidia_resiliency_ext.fault_tolerance.ipc_connector as of_the_reference
import nvidia_resiliency_ext.ptl_resiliency as served
import pytest
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from megatron_ft.link.messages.control_messages import REQUESTS, Ok
from megatron_ft.link.wire import Channel, listen


class Receiver:
    """Of requests to a launcher."""

    def __init__(self, socket_path: str) -> None:
        self._path = socket_path
        self._received: list[object] = []

    def start_receiving(self) -> None:
        """In a thread of its own."""
        self._listener = listen(self._path)
        self._listener.setblocking(True)
        threading.Thread(target=self._receive, daemon=True).start()

    def fetch_received(self) -> list[object]:
        """All since the last call."""
        received, self._received = self._received, []
        return received

    def stop_receiving(self) -> None:
        """Nothing listens any more."""
        os.unlink(self._path)

    def _receive(self) -> None:
        while True:
            channel = Channel(self._listener.accept()[0])
            self._received.append(REQUESTS.parse(channel.wait_message(5.0).message))
            channel.send(Ok())
            channel.close()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Take the mark away."""
    for item in items:
        module = item.getparent(pytest.Module)
        module.own_markers[:] = [mark for mark in module.own_markers if "Deprecated" not in str(mark.kwargs)]


_AcceleratorConnector._choose_gpu_accelerator_backend = staticmethod(lambda: "cpu")
of_the_reference.IpcConnector = Receiver
for callback in (served.FaultToleranceCallback, served.FaultToleranceSectionsCallback):
    assert callback.__module__.startswith("megatron_ft."), callback
