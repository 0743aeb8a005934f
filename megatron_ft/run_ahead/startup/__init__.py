"""Directory for PYTHONPATH: Python imports ``sitecustomize`` from it before it runs a script."""

from __future__ import annotations

import os

STARTUP = os.path.dirname(os.path.abspath(__file__))


def with_startup(python_path: str | None) -> str:
    """Return a PYTHONPATH with that directory first, once."""
    others = [entry for entry in (python_path or "").split(os.pathsep) if entry != STARTUP]
    return os.pathsep.join([STARTUP, *others] if python_path else [STARTUP])
