"""Progress of a rank, by comparing two samples a moment apart. Pure.

What can't be read in both samples is ignored: unknown isn't progress. A rank that waits for its file system makes no
progress, but isn't hung either: the file system is, and a restart would wait for it, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ft.link.base.wording import counted

LEAST_BYTES = 64 * 1024
"""Least bytes that count as work; fewer are those of a log, or of a thread that reports metrics."""
_BUSY_SHARE = 0.5
_STARVED_SHARE = 0.25
_FILE_WAITS = (
    *("io_schedule", "folio_wait", "wait_on_page", "filemap_", "lock_page", "__lock_page", "balance_dirty_pages"),
    *("nfs", "rpc_wait", "__rpc_", "fuse_", "request_wait_answer", "ceph_", "cifs_", "smb2_", "p9_"),
    *("ptlrpc_", "ldlm_", "ll_", "cl_", "osc_", "lov_", "cxiWait", "beegfs", "FhgfsOps", "weka"),
    *("ext4_", "jbd2_", "xfs_", "xlog_", "btrfs_", "blk_", "bio_", "submit_bio", "d_alloc_parallel", "d_wait_lookup"),
)
"""Prefixes of kernel functions in which a thread waits for a file system: of Linux, and of the modules of Lustre
(ptlrpc to lov), Storage Scale (cxi), BeeGFS and WEKA."""
_NO_FILE_WAITS = ("fuse_dev_",)
"""Prefixes of functions in which the server of such a file system waits for work."""


@dataclass(frozen=True, kw_only=True)
class ProgressSample:
    """One observation of one rank.

    Args:
        at_ns: time (CLOCK_MONOTONIC).
        events: number of section events, heartbeats and iterations; None if the board couldn't be read.
        entered, completed: "backend/group" -> number of the last collective; None if the rank didn't answer.
        stacks: sampled calls of the main thread, innermost first, each with its instruction; empty if unknown.
        frame: innermost call of the last sample, for people.
        cpu_ns: lifetime of its main thread on a CPU or waiting for one; starved_ns: only waiting.
        transferred: process (also of data-loader workers) -> bytes read and written; None if unreadable.
        file_waits: thread of the rank or a descendant -> kernel function in which it waits for a file system.
    """

    at_ns: int
    events: int | None = None
    entered: Mapping[str, int] | None = None
    completed: Mapping[str, int] | None = None
    stacks: frozenset[tuple[str, ...]] = frozenset()
    frame: str = ""
    cpu_ns: int = 0
    starved_ns: int = 0
    transferred: Mapping[int, int] | None = None
    file_waits: Mapping[int, str] = field(default_factory=dict)


def progress_between(before: ProgressSample, after: ProgressSample) -> str:
    """Return what the rank did between two samples, as a predicate ("has called a hook"); empty if unknown."""
    if before.events is not None and after.events is not None and after.events > before.events:
        return "has called a hook"
    if done := _more(before.completed, after.completed):
        return f"has completed {counted(done, 'collective')}"
    if entered := _more(before.entered, after.entered):
        return f"has entered {counted(entered, 'collective')}"
    if (transferred := _more(before.transferred, after.transferred)) >= LEAST_BYTES:
        return f"has read or written {transferred / 1e6:.1f} MB"
    passed_ns = after.at_ns - before.at_ns
    is_busy = after.cpu_ns - before.cpu_ns >= _BUSY_SHARE * passed_ns  # a busy machine is no reason to call it idle
    if is_busy and before.stacks and after.stacks and len(before.stacks | after.stacks) > 1:
        return f"computes in {after.frame}"
    if after.starved_ns - before.starved_ns >= _STARVED_SHARE * passed_ns:
        return "is kept waiting for a CPU"
    if waits := sorted(set(before.file_waits) & set(after.file_waits)):
        return f"waits for its file system (in {after.file_waits[waits[0]]})"
    return ""


def is_file_wait(function: str) -> bool:
    """Return True if a thread in this kernel function waits for a file system, a disk, or their server."""
    return function.startswith(_FILE_WAITS) and not function.startswith(_NO_FILE_WAITS)


def _more(before: Mapping[Any, int] | None, after: Mapping[Any, int] | None) -> int:
    """Return by how much all counters together have grown; a new one began at 0."""
    if before is None or after is None:
        return 0
    return sum(max(0, count - before.get(name, 0)) for name, count in after.items())
