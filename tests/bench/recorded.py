"""Traces of real runs: how long each step took on every rank, from the event logs.

    python -m tests.bench.recorded LOG_DIR tests/bench/recorded/NAME.json "what ran, and where"

Whether a rank moved in a slow step isn't in the logs: none is taken to.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.traces import Trace

__all__ = ["document", "read", "recorded"]

_FOLDER = Path(__file__).parent / "recorded"
STEP = "step"


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


def document(log_dir: str, about: str) -> dict[str, Any]:
    """The steps that all ranks of a cycle have made, in the runs of a log directory; milliseconds."""
    from megatron_ft.cli.analysis.analysis import analyze
    from megatron_ft.cli.analysis.intervals import ended
    from megatron_ft.cli.logs.read import read_directory
    from megatron_ft.cli.logs.runs import split_runs

    took_ms: list[list[int]] = []
    begins: list[int] = []
    for run in split_runs(read_directory(log_dir)):
        timeline = analyze(run).timeline
        for _, tracks in sorted(timeline.tracks_by_cycle.items()):
            of_ranks = [ended(timeline, track, STEP)[1] for track in sorted(tracks, key=lambda track: track.rank)]
            steps = min((len(took_ns) for took_ns in of_ranks), default=0)
            if not steps or (took_ms and len(took_ms) != len(of_ranks)):
                continue
            took_ms = took_ms or [[] for _ in of_ranks]
            begins.append(len(took_ms[0]))
            for mine, took_ns in zip(took_ms, of_ranks, strict=True):
                mine += (took_ns[:steps] // 1_000_000).tolist()
    return {"about": about, "begins": begins, "took_ms": took_ms}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(document(sys.argv[1], sys.argv[3]), separators=(",", ":")) + "\n")
