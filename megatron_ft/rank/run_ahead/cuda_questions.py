"""Questions about CUDA in a script that is run ahead, answered through NVML: a process with CUDA can't be forked."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from megatron_ft.rank.base.replacing import Replacements
from megatron_ft.rank.run_ahead.forking import ask_fork


def answer_without_cuda(
    torch: Any,
    replacements: Replacements,
    stop: Callable[[str], None],
    unwatched: Callable[[], AbstractContextManager[None]],
) -> None:
    """Have torch answer questions about CUDA without initialising it, until the replacements are undone.

    A process that has called the driver can't be forked any more. Libraries ask during import whether there is a device
    at all, which NVML knows. ``stop`` is called before the driver is initialised; acts within ``unwatched`` aren't
    watched.
    """

    def asked_elsewhere(function: Callable[[], Any]) -> Callable[[], Any]:
        """Ask NVML in a fork, because NVML keeps devices open."""

        def ask() -> Any:
            with unwatched():
                return ask_fork(function)

        return ask

    def if_driver(count: Callable[[], Any]) -> Callable[[], Any]:
        """Answer as torch does where NVML doesn't know."""

        def count_devices() -> Any:
            if not (torch.version.hip or _has_driver()):
                return 0
            stop("initialises CUDA")
            return count()

        return count_devices

    replacements.replace(torch._C, "_cuda_init", lambda *_: stop("initialises CUDA"))
    # as PYTORCH_NVML_BASED_CUDA_CHECK=1 would, which ranks would inherit
    replacements.put(torch.cuda, "_nvml_based_avail", lambda: True)
    for owner, name, standing_in in (
        (torch.cuda, "_raw_device_count_nvml", asked_elsewhere),
        (torch.cuda, "_raw_device_uuid_nvml", asked_elsewhere),
        (torch._C, "_cuda_getDeviceCount", if_driver),
    ):
        if hasattr(owner, name):
            replacements.put(owner, name, standing_in(getattr(owner, name)))


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
