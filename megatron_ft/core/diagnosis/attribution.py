"""Class of a failure by its first error: workload, hardware, network, storage, or a cascade. Pure.

A table of texts that CUDA, NCCL, gloo, torch and the operating system write. A text that isn't in the table has no
class: a wrong one would send someone to the wrong machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from megatron_ft.core.diagnosis.exceptions import is_peer_loss
from megatron_ft.core.facts.launcher import Attribution, FailureClass
from megatron_ft.core.node_health import xids

_FALLEN_OFF = re.compile(r"NVRM: .*fallen off the bus", re.DOTALL)
_MEMORY_KILL = re.compile(r"[Oo]ut of memory: Kill(?:ed)? process (\d+)")
_OF_THE_PROGRAM = (13, 31)
"""Xids that a kernel's own error raises."""
_FOLLOW = (43, 45)
"""Xids of a channel that is reset because of another error: no cause of their own."""
_TELLING = re.compile(r"NVRM: Xid |NVRM: .*fallen off the bus|[Oo]ut of memory: Kill")
_MOST_LINES, _LONGEST_LINE = 8, 200
_WORKLOAD, _HARDWARE = FailureClass.WORKLOAD, FailureClass.HARDWARE
_NETWORK, _STORAGE, _CASCADE = FailureClass.NETWORK, FailureClass.STORAGE, FailureClass.CASCADE

_SIGNS: tuple[tuple[FailureClass, str, str], ...] = (
    # hardware, and a node whose driver isn't in order
    (_HARDWARE, "ECC error of the GPU", r"(uncorrectable|double bit) ecc error|ecc_?uncorrectable|contained ecc"),
    (_HARDWARE, "NVLink error", r"nvlink (hardware )?error|(uncorrectable|fatal) nvlink|nvlink_?uncorrectable"),
    (_HARDWARE, "lost GPU", r"gpu is lost|fallen off the bus|unable to determine the device handle"),
    (_HARDWARE, "lost GPU", r"cuda_?error_?device_?unavailable|device\(s\) is/are busy or unavailable"),
    (_HARDWARE, "no GPU", r"no cuda gpus are available|no cuda-capable device|cuda_error_no_device"),
    (_HARDWARE, "fabric manager not ready", r"system not yet initialized|system_?not_?ready"),
    (_HARDWARE, "driver mismatch", r"driver/library version mismatch|system has unsupported display driver"),
    (_HARDWARE, "GPU hardware error", r"hardware stack error|cuda_error_hardware|gpu hardware"),
    (_HARDWARE, "machine check", r"machine check exception|hardware error.*mce|\bmce: .*hardware error"),
    # storage
    (_STORAGE, "disk full", r"no space left on device|errno 28\b|\benospc\b"),
    (_STORAGE, "disk quota", r"disk quota exceeded|errno 122\b|\bedquot\b"),
    (_STORAGE, "stale file handle", r"stale (nfs )?file handle|errno 116\b|\bestale\b"),
    (_STORAGE, "input/output error", r"input/output error|remote i/o error|errno (5|121)\b"),
    (_STORAGE, "read-only file system", r"read-only file system|errno 30\b"),
    (_STORAGE, "lost mount", r"transport endpoint is not connected|transport endpoint shutdown|errno (107|108)\b"),
    (_STORAGE, "failed write", r"pytorchstreamwriter failed writing|file write failed|unexpected pos \d+ vs \d+"),
    (_STORAGE, "damaged file", r"failed finding central directory|pytorchstreamreader failed|metadataincompletebuffer"),
    # network: signs of the link itself, not of a peer that is gone
    (_NETWORK, "InfiniBand error", r"got completion .*(status|error)[ =]*\d"),
    (
        _NETWORK,
        "InfiniBand error",
        r"ibv_\w+ failed|transport retry counter|got async event ?: ?port error|local qp op",
    ),
    (_NETWORK, "no route", r"no route to host|network is unreachable|errno (101|113)\b|host is unreachable"),
    (
        _NETWORK,
        "name resolution",
        r"name or service not known|temporary failure in name resolution|gaierror|nodename nor",
    ),
    (_NETWORK, "no connection", r"client socket has (timed out|failed to connect)|socket has failed to connect"),
    (
        _NETWORK,
        "no connection",
        r"connectfullmesh failed|socketstartconnect: connect to|failed to connect to .* timed out",
    ),
    (_NETWORK, "no connection", r"\bconnect ((to|from) \S+ )?failed ?: ?(connection timed out|software caused)"),
    (_NETWORK, "no interface", r"no socket interface found|bootstrap : no socket interface|unable to find address for"),
    (_NETWORK, "UCX or OFI error", r"\bucx\b.*(endpoint|timeout|unreachable)|net/ofi .*(error|failed)|efa .*error"),
    # the workload: memory, kernels, data
    (_WORKLOAD, "GPU out of memory", r"cuda out of memory|cuda error: out of memory|outofmemoryerror"),
    (_WORKLOAD, "GPU out of memory", r"cublas_status_alloc_failed|cuda_error_out_of_memory|failed to cuda calloc"),
    (
        _WORKLOAD,
        "shared memory too small",
        r"insufficient shared memory|out of shared memory|bus error.*dataloader|/dev/shm",
    ),
    (_WORKLOAD, "shared memory too small", r"dataloader worker.*bus error"),
    (
        _WORKLOAD,
        "host out of memory",
        r"memoryerror|cannot allocate memory|can't allocate memory|std::bad_alloc|errno 12\b",
    ),
    (_WORKLOAD, "dead data loader", r"dataloader worker .*(exited unexpectedly|is killed by signal)"),
    (_WORKLOAD, "assertion on the device", r"device-side assert|assertion `.*` failed|cuda_error_assert"),
    (_WORKLOAD, "illegal memory access", r"illegal memory access|cuda_error_illegal_address|misaligned address"),
    (
        _WORKLOAD,
        "invalid kernel",
        r"illegal instruction was encountered|no kernel image is available|invalid device function",
    ),
    (_WORKLOAD, "too many open files", r"too many open files|errno 24\b"),
    (
        _WORKLOAD,
        "not a number",
        r"found (nan|inf)|\b(loss|grad\w*|norm)\b.{0,40}\b(is|=|:) ?(nan|inf)\b|unexpected result (nan|inf)",
    ),
    (
        _WORKLOAD,
        "wrong shape or type",
        r"size mismatch|shapes? .{0,80}(mismatch|cannot be multiplied|invalid for)|mat1 and mat2",
    ),
    (
        _WORKLOAD,
        "wrong shape or type",
        r"must match the size of tensor|expected scalar type|should have the same dtype|mark a variable ready",
    ),
    (
        _WORKLOAD,
        "wrong shape or type",
        r"error\(s\) in loading state_dict|missing key\(s\) in state_dict|expected all tensors to be on the same",
    ),
    (
        _WORKLOAD,
        "misused collectives",
        r"ncclinvalidusage|duplicate gpu detected|mismatch(ed)? .*collective|detected mismatch between collectives",
    ),
)
"""Class, sign, and regular expression for the lower-case text. The first match counts: what names the broken part
stands before what any part may write."""
_OF_A_PROGRAM = (
    *("AssertionError", "AttributeError", "ImportError", "IndexError", "KeyError", "ModuleNotFoundError", "NameError"),
    *("NotImplementedError", "RecursionError", "SyntaxError", "IndentationError", "TypeError", "UnboundLocalError"),
    *("ValueError", "ZeroDivisionError", "FileNotFoundError", "PermissionError", "UnicodeDecodeError", "OverflowError"),
    *("JSONDecodeError", "argparse.ArgumentError", "StopIteration", "IsADirectoryError", "NotADirectoryError"),
)
"""Exceptions of Python that come from the program, its arguments or its data."""
_COMPILED = tuple((kind, sign, re.compile(pattern, re.DOTALL)) for kind, sign, pattern in _SIGNS)
_LOST_PEER = re.compile(
    r"closed by (remote )?peer|reset by peer|ncclremoteerror|remote process exit|watchdog caught collective"
    r"|socket recv failed while polling|broken pipe|communicator was aborted|heartbeat monitor timed out",
)


def attribute(error: str, kernel: Iterable[str] = (), *, pid: int | None = None) -> Attribution | None:
    """Return the class of a failure; None if it is unknown.

    Args:
        error: exception, "type: message", or another text of the process; empty if it left none.
        kernel: lines of the node's kernel log since the rank's start.
        pid: process of the rank, which the kernel may have killed for lack of memory.
    """
    by_kernel = _attribute_kernel(tuple(kernel), pid)
    if by_kernel is not None:
        return by_kernel
    text = error.lower()
    for kind, sign, pattern in _COMPILED:
        if pattern.search(text):
            return Attribution(kind=kind, sign=sign)
    if _LOST_PEER.search(text) or is_peer_loss(error):
        return Attribution(kind=_CASCADE)  # the line says so in its own words
    is_programs = error.partition(":")[0].strip().endswith(_OF_A_PROGRAM)
    return Attribution(kind=_WORKLOAD) if is_programs else None


def _attribute_kernel(lines: tuple[str, ...], pid: int | None) -> Attribution | None:
    numbers = [xid for xid in xids(lines) if xid not in _FOLLOW]
    broken = [xid for xid in numbers if xid not in _OF_THE_PROGRAM]
    if broken:
        return Attribution(kind=_HARDWARE, sign=f"Xid {broken[0]}")
    if any(_FALLEN_OFF.search(line) for line in lines):
        return Attribution(kind=_HARDWARE, sign="lost GPU")
    if pid in {int(match[1]) for line in lines if (match := _MEMORY_KILL.search(line))}:
        return Attribution(kind=_WORKLOAD, sign="host out of memory, killed by the kernel")
    return Attribution(kind=_WORKLOAD, sign=f"Xid {numbers[0]}") if numbers else None


def telling_kernel_lines(records: Iterable[str], since_us: int) -> tuple[str, ...]:
    """Return the lines of GPUs and of memory, without their prefix.

    Args:
        records: of /dev/kmsg: "priority,number,microseconds,flags;text".
        since_us: only those of that time (since the node's boot) or later.
    """
    found = []
    for record in records:
        head, _, text = record.partition(";")
        stamp = head.split(",")[2:3]
        if stamp and stamp[0].isdigit() and int(stamp[0]) >= since_us and _TELLING.search(text):
            found.append(text[:_LONGEST_LINE])
    return tuple(found[:_MOST_LINES])
