"""Names of modules that a forked rank has loaded since its fork, for the server of the next cycles.

They are in memory that both share: one rank of the node writes it, from the thread that watches collectives.
"""

from __future__ import annotations

import importlib
import os
import struct
import sys
from collections.abc import Mapping
from mmap import mmap

from megatron_ft.link.base.rank_variables import is_set_for_ranks

SIZE = 1 << 18
_LENGTH = struct.Struct("=I")
ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"  # torch counts devices without the CUDA driver, which no fork could use then
_IGNORED = {ASK_NVML, "TORCHINDUCTOR_CACHE_DIR", "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"}
"""Variables that torch and megatron-core set themselves, or that only the server has."""


class LoadedModules:
    """The shared memory: the length of a text, and the names in it, one a line."""

    def __init__(self, memory: mmap) -> None:
        self._memory = memory
        self._taken: set[str] = set()
        self._known: set[str] = set()
        self._environment: Mapping[str, str] | None = None
        self._count = 0

    def prepare_fork(self) -> None:
        """Do in the server what visits many objects: a rank would copy the page of each, which takes milliseconds."""
        importlib.invalidate_caches()
        self._known = set(sys.modules)

    def begin(self, environment: Mapping[str, str] | None) -> None:
        """Begin in a rank; its own variables aside, the server had this environment. None: another rank writes."""
        self._environment, self._count = environment, len(sys.modules)

    def note(self) -> None:
        """Write the names, if there are new ones. A module that might read a variable set since isn't the same."""
        if self._environment is None or len(sys.modules) == self._count:
            return
        self._count = len(sys.modules)
        names = {*self._environment, *os.environ} - _IGNORED
        if any(self._environment.get(name) != os.environ.get(name) for name in names if not is_set_for_ranks(name)):
            return
        text = "\n".join(name for name in list(sys.modules) if name not in self._known).encode(errors="replace")
        if len(text) <= SIZE - _LENGTH.size:
            self._memory[_LENGTH.size : _LENGTH.size + len(text)] = text
            _LENGTH.pack_into(self._memory, 0, len(text))

    def take(self) -> list[str]:
        """Return, in the server, the names that weren't returned before."""
        (length,) = _LENGTH.unpack_from(self._memory)
        text = self._memory[_LENGTH.size : _LENGTH.size + length].decode(errors="replace")
        new = [name for name in text.splitlines() if name not in self._taken]
        self._taken.update(new)
        return [name for name in new if all(part.isidentifier() for part in name.split("."))]


current: LoadedModules | None = None
"""Names of the server, and of the ranks that it forks; None in a fresh interpreter."""
