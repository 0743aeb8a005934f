"""Which failures of a start are the user's mistake, and would be the same in the next cycle."""

from __future__ import annotations

import pytest

from megatron_ft.core.diagnosis.failed_start import failure_signature
from tests.unit.core.diagnosis.test_exit_description import ended


@pytest.mark.parametrize(
    "error",
    [
        "ModuleNotFoundError: No module named 'pycuda'",
        "ImportError: cannot import name 'x' from 'megatron.core'",
        "TypeError: main() got an unexpected keyword argument 'lr'",
        "AssertionError: world size (3) is not divisible by 2",
        "FileNotFoundError: [Errno 2] No such file or directory: 'vocab.json'",
    ],
)
def test_a_mistake_is_its_exception(error: str) -> None:
    for is_watched in (True, False):
        assert failure_signature(ended(1, 1, error=error), is_watched=is_watched, lived_s=20.0) == error
    assert failure_signature(ended(1, 1, error=error), is_watched=False, lived_s=61.0) == ""
    assert failure_signature(ended(1, -9, error=error), is_watched=True, lived_s=20.0) == ""


@pytest.mark.parametrize(
    "error",
    [
        "OSError: [Errno 98] Address already in use",
        "DistNetworkError: The server socket has failed to listen on any local network address.",
        "DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
        "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, unhandled system error",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory",
        "OSError: [Errno 116] Stale file handle: '/ckpt'",
        "EOFError: ",
        "BlockingIOError: [Errno 11] Resource temporarily unavailable",
    ],
)
def test_what_may_come_from_outside_is_none(error: str) -> None:
    assert failure_signature(ended(1, 1, error=error), is_watched=True, lived_s=1.0) == ""


@pytest.mark.parametrize(
    ("code", "watched", "unwatched"), [(1, "exit code 1", ""), (2, "exit code 2", "exit code 2"), (137, "", "")]
)
def test_codes(code: int, watched: str, unwatched: str) -> None:
    assert failure_signature(ended(1, code), is_watched=True, lived_s=1e5) == watched
    assert failure_signature(ended(1, code), is_watched=False, lived_s=1.0) == unwatched
