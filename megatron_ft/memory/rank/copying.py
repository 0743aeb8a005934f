"""Copies tensors into a segment: at the speed of the machine's memory, and all of them before `save` returns."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import operator
import os
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from typing import Any, NamedTuple

from msgspec import Raw

from megatron_ft.memory.base.segment import CHUNK_BYTES
from megatron_ft.memory.base.threads import each_of
from megatron_ft.memory.rules.segment_layout import ITEM_BYTES, encode_rows

_SMALL = 64 << 10
"""Bytes below which consecutive tensors are written by one system call."""
_AT_ONCE = 1024
"""Buffers of one system call; the kernel takes no more."""
_PIECE = 8 << 20
_POPULATE_WRITE = 23
_THREADS = 8
LOCKED_BYTES = 1 << 30
"""Most page-locked memory of a rank, in two halves: one is filled by the device while the other one is copied."""

_libc = ctypes.CDLL(None, use_errno=True)
_word, _address = ctypes.c_size_t, ctypes.c_void_p
_libc.mmap.argtypes = (_address, _word, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.mmap.restype = _address
_libc.munmap.argtypes = (_address, _word)
_libc.madvise.argtypes = (_address, _word, ctypes.c_int)
_libc.pwritev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_libc.pwritev.restype = ctypes.c_ssize_t


class Mapping:
    """A segment in this process's address space. A fork doesn't get it: no process could seal the segment then."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map and touch every page; ``fd`` stays the caller's."""
        self.fd, self.nbytes = fd, nbytes
        found = _libc.mmap(None, max(1, nbytes), mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if found in (None, _word(-1).value):
            raise OSError(ctypes.get_errno(), "a segment can't be mapped")
        self.address: int = found
        _libc.madvise(found, nbytes, mmap.MADV_DONTFORK)
        for at in range(0, nbytes, CHUNK_BYTES):  # a kernel that doesn't know this touches pages as they are used
            _libc.madvise(found + at, min(CHUNK_BYTES, nbytes - at), _POPULATE_WRITE)

    def close(self) -> None:
        address, self.address = self.address, 0
        if address:
            for at in range(0, max(1, self.nbytes), CHUNK_BYTES):
                _libc.munmap(address + at, min(CHUNK_BYTES, max(1, self.nbytes) - at))


def memory_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B") if nbytes else memoryview(b"")


class Plan(NamedTuple):
    """Where each tensor of a state goes. States of the same dtypes and shapes share one.

    Args:
        rows: dtypes and shapes, encoded.
        runs: first and last number of tensors that follow each other and are small, or of a single large one.
    """

    dtypes: list[Any]
    shapes: list[Any]
    rows: Raw
    nbytes: list[int]
    offsets: list[int]
    data_bytes: int
    runs: list[tuple[int, int]]


def _of_each(name: str, tensors: Sequence[Any]) -> Iterator[Any]:
    """Yield an attribute of each tensor, or what a method of each returns, without a step of Python for each."""
    import torch

    found: Any = getattr(torch.Tensor, name)
    return map(found if callable(found) else found.__get__, tensors)


def plan_for(tensors: Sequence[Any], last: Plan | None) -> Plan:
    """Return where these tensors go; ``last`` if it fits. None of them is unfit."""
    if last is not None and len(last.shapes) == len(tensors):
        # one by one: new objects for many tensors would have Python's garbage collector look at all that the script has
        is_same = all(map(operator.is_, _of_each("dtype", tensors), last.dtypes))
        if is_same and all(map(operator.eq, _of_each("shape", tensors), last.shapes)):
            return last
    dtypes, shapes = [each.dtype for each in tensors], [each.shape for each in tensors]
    names = [*map(name_of_dtype, dtypes)]
    sizes = [ITEM_BYTES[name] * shape.numel() for name, shape in zip(names, shapes, strict=True)]
    *offsets, end = accumulate(sizes, initial=0)
    runs: list[tuple[int, int]] = []
    for number, nbytes in enumerate(sizes):
        follows = runs and nbytes < _SMALL and sizes[number - 1] < _SMALL
        if follows and number - runs[-1][0] < _AT_ONCE:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return Plan(dtypes, shapes, encode_rows(zip(names, shapes, strict=True)), sizes, offsets, end, runs)


_LOOK = ("device", "layout", "dtype", "is_nested")


def find_unfit(tensors: Sequence[Any]) -> tuple[int, str] | None:
    """Return the number of a tensor that can't be kept, and why; None if all can."""
    # what is unfit is so for one of these: of a thousand tensors few different ones are looked at
    known = tensors[:1] if all(_of_each("is_cpu", tensors)) else tensors  # as to its device, which is slow to compare
    looks = product(
        set(map(type, tensors)),
        set(_of_each("device", known)),
        *(set(_of_each(name, tensors)) for name in _LOOK[1:]),
    )
    if not any(_why_unfit(*look) for look in looks):
        return None
    return next((number, why) for number, each in enumerate(tensors) if (why := why_unfit(each)))


def why_unfit(tensor: Any) -> str:
    """Return why a tensor can't be kept; empty if it can."""
    return _why_unfit(type(tensor), *(getattr(tensor, name) for name in _LOOK))


def _why_unfit(kind: type, device: Any, layout: Any, dtype: Any, is_nested: bool) -> str:
    import torch

    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return f"is a {kind.__name__}; give the plain tensor inside it"
    if is_nested:
        return "is a nested tensor; give its components"
    is_known = device.type in ("cpu", "cuda") and name_of_dtype(dtype) in ITEM_BYTES
    if layout is not torch.strided or not is_known:
        return f"is a {layout} tensor of {dtype} on {device}; keep a copy"
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return f"is on {device}; a state has tensors of the current device only"
    return ""


@functools.cache
def name_of_dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def is_plain(tensor: Any) -> bool:
    """Return True if the bytes that are kept lie in memory as they are."""
    return bool(tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())


def plain(tensor: Any) -> Any:
    """Return the tensor, or a copy, so that its bytes are those that are kept."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def copy_tensors(tensors: Sequence[Any], plan: Plan, into: Mapping) -> None:
    """Copy all tensors to their places."""
    on_device = [] if all(_of_each("is_cpu", tensors)) else [at for at, each in enumerate(tensors) if not each.is_cpu]
    odd = on_device or not all(_of_each("is_contiguous", tensors))
    if odd or any(_of_each("is_neg", tensors)) or any(_of_each("is_conj", tensors)):
        made = [each if not each.is_cpu or is_plain(each) else plain(each) for each in tensors]
    else:
        made = [*tensors]
    addresses = [*_of_each("data_ptr", made)]
    moves = []
    for first, last in plan.runs:
        if first == last or on_device:
            for number in range(first, last + 1):
                if made[number].is_cpu:
                    moves += pieces(into.address + plan.offsets[number], addresses[number], plan.nbytes[number])
            continue
        vector = array("Q", bytes(16 * (last + 1 - first)))
        vector[0::2] = array("Q", addresses[first : last + 1])
        vector[1::2] = array("Q", plan.nbytes[first : last + 1])
        count = sum(plan.nbytes[first : last + 1])
        written = _libc.pwritev(into.fd, vector.buffer_info()[0], last + 1 - first, plan.offsets[first])
        if written != count:
            raise OSError(ctypes.get_errno(), f"{written} of {count} bytes were written into a segment")
    move(moves)
    if on_device:
        _receive([(tensors[number], plan.offsets[number], plan.nbytes[number]) for number in on_device], into)


def pieces(to: int, source: int, nbytes: int) -> list[tuple[int, int, int]]:
    return [(to + at, source + at, min(_PIECE, nbytes - at)) for at in range(0, nbytes, _PIECE)]


def move(moves: Sequence[tuple[int, int, int]]) -> None:
    """Copy memory: to, from, number of bytes."""
    each_of(moves, lambda each: ctypes.memmove(*each), threads())


def threads() -> int:
    """Return the number of threads that copy: as many as this rank has processors; one doesn't fill the bandwidth."""
    return min(_THREADS, len(os.sched_getaffinity(0)) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _receive(sources: Sequence[tuple[Any, int, int]], into: Mapping) -> None:
    """Copy from a device, by page-locked memory of which the device fills one half while the other one is emptied."""
    import torch

    cuda: Any = torch.cuda  # streams and events have no types
    total = sum(nbytes for _, _, nbytes in sources)
    half = max(1, min(LOCKED_BYTES // 2, total))
    locked = _locked(2 * half if total > half else half)
    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    sent: list[tuple[Any, list[tuple[int, int, int]]]] = []
    try:
        with cuda.stream(stream):
            for number, batch in enumerate(_batches(sources, half)):
                moves, at = [], number % 2 * half
                for flat, offset in batch:
                    locked[at : at + len(flat)].copy_(flat, non_blocking=True)
                    moves += pieces(into.address + offset, locked.data_ptr() + at, len(flat))
                    at += len(flat)
                event = cuda.Event()
                event.record(stream)
                sent.append((event, moves))
                if len(sent) > 1:
                    _arrived(*sent.pop(0))
        for each in sent:
            _arrived(*each)
    finally:
        with contextlib.suppress(RuntimeError):  # the device has failed
            stream.synchronize()  # the next snapshot uses the same memory


def _arrived(event: Any, moves: Sequence[tuple[int, int, int]]) -> None:
    event.synchronize()
    move(moves)


def _batches(sources: Sequence[tuple[Any, int, int]], most: int) -> list[list[tuple[Any, int]]]:
    """Return parts of flat tensors, with their places in the segment, in batches of at most ``most`` bytes."""
    import torch

    batches: list[list[tuple[Any, int]]] = [[]]
    room = most
    for tensor, offset, nbytes in sources:
        flat, at = plain(tensor).reshape(-1).view(torch.uint8), 0
        while at < nbytes:
            if not room:
                batches.append([])
                room = most
            count = min(room, nbytes - at)
            batches[-1].append((flat[at : at + count], offset + at))
            at, room = at + count, room - count
    return batches


_kept_locked: Any = None


def _locked(nbytes: int) -> Any:
    """Return page-locked memory, which is kept for the next snapshot."""
    global _kept_locked
    import torch

    if _kept_locked is None or len(_kept_locked) < nbytes:
        _kept_locked = None  # freed before the larger one is made
        _kept_locked = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return _kept_locked
