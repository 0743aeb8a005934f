"""XXH3-128 of xxhash's extension module, which processes without site-packages load by its path."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

Digest = Callable[[Iterable[Any]], bytes]
"""Returns the digest of buffers, one after the other. Other threads run meanwhile."""


def find_module() -> str | None:
    """Return the path of the extension module that this interpreter would import; None if xxhash isn't installed."""
    try:
        spec = importlib.util.find_spec("xxhash._xxhash")
    except (ImportError, ValueError):
        return None
    return None if spec is None else spec.origin


@functools.cache
def installed() -> Digest | None:
    """Return the digest function of the installed xxhash; None if it isn't installed, or can't be loaded."""
    try:
        return None if (path := find_module()) is None else load(path)
    except ImportError:
        return None


def load(path: str) -> Digest:
    """Return the digest function of the extension module at ``path``."""
    loader = importlib.machinery.ExtensionFileLoader("_xxhash", path)
    spec = importlib.util.spec_from_file_location("_xxhash", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)

    def digest(buffers: Iterable[Any]) -> bytes:
        hasher = module.xxh3_128()
        for each in buffers:
            hasher.update(each)
        return bytes(hasher.digest())

    return digest
