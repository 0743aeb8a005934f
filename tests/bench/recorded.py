"""Traces of real runs: how long each step took on every rank.

They were made from event logs of schema 1, which had each interval of each rank. Whether a rank moved in a slow step
wasn't in them: none is taken to.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.traces import Trace

__all__ = ["read", "recorded"]

_FOLDER = Path(__file__).parent / "recorded"


def recorded() -> list[Trace]:
    """All that are kept here."""
    return [read(path.stem, json.loads(path.read_text())) for path in sorted(_FOLDER.glob("*.json"))]


def read(name: str, kept: dict[str, Any]) -> Trace:
    """From what ``document`` made."""
    took_s = np.array(kept["took_ms"], dtype=np.float64).T / 1e3
    none = np.zeros(len(took_s), dtype=np.bool_)
    begins = none.copy()
    begins[kept["begins"]] = True
    return Trace(name.replace("-", " "), np.maximum(took_s, 1e-3), begins, none, none)
