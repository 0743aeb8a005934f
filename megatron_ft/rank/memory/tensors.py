"""Tensors of a state: which can be kept, where their bytes are, and which of them an optimizer owns."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron_ft.core.errors import SnapshotError
from megatron_ft.core.memory.segment_layout import ITEM_BYTES, Path, TensorEntry, name_of, nbytes_of, split

_NO_DIGEST = "0" * 32


class Source(NamedTuple):
    """One tensor to save, detached."""

    entry: TensorEntry
    tensor: Any


class Gathered(NamedTuple):
    """A state that can be saved. ``values``: with a `TensorAt` for each of the ``sources``."""

    values: Any
    sources: list[Source]
    data_bytes: int


def is_tensor(value: object) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def gather(state: object) -> Gathered:
    """Return the tensors of a state, each with its place in a segment.

    Raises:
        SnapshotError: the state, or a tensor in it, is of a kind that can't be kept.
    """
    if not isinstance(state, dict):
        raise SnapshotError(f"a state is a dict, not of type {type(state).__name__}")
    values, tensors = split(state, is_tensor)
    sources, end = [], 0
    for path, tensor in tensors:
        dtype = check_kind(path, tensor)
        shape = tuple(tensor.shape)
        entry = TensorEntry(path, dtype, shape, end, nbytes_of(dtype, shape), _NO_DIGEST)
        sources.append(Source(entry, tensor.detach()))
        end += entry.nbytes
    return Gathered(values, sources, end)


def check_kind(path: Path, tensor: Any) -> str:
    """Return the name of the tensor's dtype.

    Raises:
        SnapshotError: tensors of this kind can't be kept.
    """
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise SnapshotError(f"{name_of(path)} is a {type(tensor).__name__}; give the plain tensor inside it")
    if tensor.layout is not torch.strided or dtype not in ITEM_BYTES or tensor.device.type not in ("cpu", "cuda"):
        raise SnapshotError(f"{name_of(path)} is a {tensor.layout} tensor of {dtype} on {tensor.device}; keep a copy")
    return dtype


def memory_of(tensor: Any) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory; they live as long as the tensor."""
    count = tensor.numel() * tensor.element_size()
    if count == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B")


def is_plain(tensor: Any) -> bool:
    """Return True for a contiguous tensor that has its memory for itself: no view into a buffer."""
    count = tensor.numel() * tensor.element_size()
    return bool(
        tensor.is_contiguous()
        and tensor.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == count
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


class Optimizers:
    """The optimizers of this process that have made a step since ``watch``. ``before_step`` is called before each."""

    def __init__(self, before_step: Callable[[], None]) -> None:
        self._before_step = before_step
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_watching = False

    def watch(self) -> None:
        """Begin to watch; again: no effect."""
        if not self._is_watching:
            from torch.optim.optimizer import register_optimizer_step_pre_hook

            register_optimizer_step_pre_hook(self._on_step)
            self._is_watching = True

    def owned(self) -> set[tuple[int, int]]:
        """Return address and bytes of each tensor that only a step of a known optimizer changes."""
        found: set[tuple[int, int]] = set()
        for optimizer in list(self._known):
            for group in optimizer.param_groups:
                found.update(map(_place, group["params"]))
            for values in optimizer.state.values():
                if isinstance(values, dict):
                    found.update(_place(value) for value in values.values() if is_tensor(value))
        return found

    def _on_step(self, optimizer: Any, _arguments: Any, _named: Any) -> None:
        self._known.add(optimizer)
        self._before_step()


def apart(sources: Sequence[Source], owned: set[tuple[int, int]]) -> tuple[list[Source], list[Source]]:
    """Return the sources that may be read while training goes on, and those to copy at once."""
    read_later: list[Source] = []
    copied: list[Source] = []
    for source in sources:
        is_owned = source.entry.nbytes > 0 and _place(source.tensor) in owned and is_plain(source.tensor)
        (read_later if is_owned else copied).append(source)
    return read_later, copied


def _place(tensor: Any) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()
