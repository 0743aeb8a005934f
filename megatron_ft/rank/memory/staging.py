"""Copies that are made within ``save``: of what training may change, and of what is on a device."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from typing import Any

from megatron_ft.core.errors import SnapshotError
from megatron_ft.rank.memory.tensors import Source


def copied_bytes(later: Sequence[Source], now: Sequence[Source]) -> int:
    """Return the bytes that `Staging` needs."""
    return sum(each.entry.nbytes for each in now) + sum(each.entry.nbytes for each in later if each.tensor.is_cuda)


class Staging:
    """Host memory for copies, kept from one snapshot to the next; page-locked for tensors of a device."""

    def __init__(self) -> None:
        self._plain = HostMemory(is_locked=False)
        self._locked = HostMemory(is_locked=True)
        self._stream: Any = None

    def copy_now(self, sources: Sequence[Source]) -> list[Source]:
        """Return copies in host memory."""
        host = [each for each in sources if not each.tensor.is_cuda]
        self._plain.begin(sum(each.entry.nbytes for each in host))
        copies = []
        for source in host:
            tensor = source.tensor.resolve_conj().resolve_neg().contiguous()
            copy = self._plain.take(source.entry.nbytes)
            if source.entry.nbytes:
                ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), source.entry.nbytes)
            copies.append(Source(source.entry, copy))
        return copies

    def send(self, later: Sequence[Source], now: Sequence[Source]) -> tuple[list[Source], Any]:
        """Copy what is on a device into page-locked memory, with one synchronisation for all of ``now``.

        Returns the copies, and the event after which those of ``later`` are complete; None if none is on a device.

        Raises:
            RuntimeError: memory doesn't suffice, or the device fails; torch's.
            MemoryError: the same.
            SnapshotError: a tensor is on another device than the current one.
        """
        on_device = [each for each in (*now, *later) if each.tensor.is_cuda]
        self._locked.begin(sum(each.entry.nbytes for each in on_device))
        if not on_device:
            return [], None
        import torch

        devices = {each.tensor.device for each in on_device}
        if devices != {torch.device("cuda", torch.cuda.current_device())}:
            names = ", ".join(sorted(map(str, devices)))
            raise SnapshotError(f"a state has tensors of the current device only, not of {names}")
        cuda: Any = torch.cuda  # streams and events have no types
        training = cuda.current_stream()
        self._stream = self._stream or cuda.Stream()
        self._stream.wait_stream(training)
        try:
            copies = [self._receive(each) for each in now if each.tensor.is_cuda]
            training.synchronize()
            with cuda.stream(self._stream):
                copies += [self._receive(each) for each in later if each.tensor.is_cuda]
                event = cuda.Event()
                event.record(self._stream)
        except (RuntimeError, MemoryError):
            with contextlib.suppress(RuntimeError):
                self._stream.synchronize()  # the next snapshot uses the same memory
            raise
        return copies, event

    def _receive(self, source: Source) -> Source:
        import torch

        copy = self._locked.take(source.entry.nbytes)
        if source.entry.nbytes:
            flat = source.tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            copy.copy_(flat, non_blocking=True)
        return Source(source.entry, copy)


class HostMemory:
    """Bytes of host memory that are kept from one use to the next."""

    def __init__(self, *, is_locked: bool) -> None:
        self._is_locked = is_locked
        self._memory: Any = None
        self._end = 0

    def begin(self, nbytes: int) -> None:
        """Forget what was taken, and have room for ``nbytes``."""
        import torch

        self._end = 0
        if nbytes and (self._memory is None or self._memory.numel() < nbytes):
            self._memory = None  # freed before the larger one is made
            self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._is_locked)

    def take(self, nbytes: int) -> Any:
        """Return the next bytes, as a tensor."""
        import torch

        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        start, self._end = self._end, self._end + nbytes
        return self._memory[start : self._end]
