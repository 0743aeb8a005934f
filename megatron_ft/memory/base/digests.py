"""XXH3-128 of xxhash's extension module, which processes without site-packages load by its path."""

from __future__ import annotations

import functools
import glob
import importlib.machinery
import importlib.util
import os
from collections.abc import Callable
from typing import Any

_NAME = "_xxhash"

Digest = Callable[[Any], bytes]
"""Returns the digest of a buffer. Other threads run meanwhile."""


def find_module() -> str | None:
    """Return the path of the extension module that this interpreter would import; None if xxhash isn't installed."""
    try:
        package = importlib.util.find_spec("xxhash")
    except (ImportError, ValueError):
        return None
    for place in (package and package.submodule_search_locations) or ():
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            for path in glob.glob(os.path.join(glob.escape(place), f"{_NAME}{suffix}")):
                return path
    return None


@functools.cache
def installed() -> Digest | None:
    """Return the digest function of the installed xxhash; None if it isn't installed.

    Raises:
        ImportError: it can't be loaded.
    """
    path = find_module()
    return None if path is None else load(path)


def load(path: str) -> Digest:
    """Return the digest function of the extension module at ``path``.

    Raises:
        ImportError: it can't be loaded.
    """
    loader = importlib.machinery.ExtensionFileLoader(_NAME, path)
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)

    def digest(data: Any) -> bytes:
        hasher = module.xxh3_128()
        hasher.update(data)  # the function that does both holds the interpreter's lock
        found: bytes = hasher.digest()
        return found

    return digest
