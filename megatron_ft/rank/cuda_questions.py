"""CUDA in a script that is run ahead: questions are answered without it, and its initialisation is where ranks begin.

A process that has asked the driver for anything can't be forked any more. Libraries ask, while they are imported,
whether there is a device at all: NVML knows that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from megatron_ft.rank.forking import ask_fork
from megatron_ft.rank.replacing import Replacements

__all__ = ["answer_without_cuda"]


def answer_without_cuda(
    torch: Any,
    replacements: Replacements,
    stop: Callable[[str], None],
    unwatched: Callable[[], AbstractContextManager[None]],
) -> None:
    """Let torch answer so until the replacements are undone.

    Args:
        torch: the module.
        replacements: of its functions.
        stop: is called before the driver is initialised.
        unwatched: a context in which nothing is noticed.
    """
    cuda, c_extension = torch.cuda, torch._C
    replacements.replace(c_extension, "_cuda_init", lambda *_: stop("initialises CUDA"))
    # what PYTORCH_NVML_BASED_CUDA_CHECK=1 does, which ranks would inherit
    replacements.put(cuda, "_nvml_based_avail", lambda: True)
    for name in ("_raw_device_count_nvml", "_raw_device_uuid_nvml"):
        if hasattr(cuda, name):
            replacements.put(cuda, name, _asked_elsewhere(getattr(cuda, name), unwatched))
    count = getattr(c_extension, "_cuda_getDeviceCount", None)
    if count is None:
        return

    def count_devices() -> Any:
        """Where NVML doesn't know."""
        if not (torch.version.hip or _has_driver()):
            return 0
        stop("initialises CUDA")
        return count()

    replacements.put(c_extension, "_cuda_getDeviceCount", count_devices)


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _asked_elsewhere(
    function: Callable[[], Any], unwatched: Callable[[], AbstractContextManager[None]]
) -> Callable[[], Any]:
    """NVML keeps devices open: a process of its own asks it."""

    def ask() -> Any:
        with unwatched():
            return ask_fork(function)

    return ask
