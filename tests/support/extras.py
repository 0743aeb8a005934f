"""Tests of what isn't always installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

__all__ = ["skip_module_without"]


def skip_module_without(*packages: str) -> None:
    """``pytest.importorskip`` without the import, which takes seconds for packages that only ranks use."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} isn't installed", allow_module_level=True)
