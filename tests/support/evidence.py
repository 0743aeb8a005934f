"""Evidence on a rank of which little is known."""

from __future__ import annotations

from typing import Any

from megatron_ft.diagnosis.evidence import RankEvidence
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot

__all__ = ["exit_evidence", "hang_evidence"]


def hang_evidence(**known: Any) -> RankEvidence:
    note = RankSnapshot(rank=3, host="a", pid=12)
    return RankEvidence(**{"summary": "rank 3: does not answer", "note": note, "cycle": 0, "took_s": 0.1, **known})


def exit_evidence(**known: Any) -> RankEvidence:
    note = RankSnapshot(rank=3, host="a", pid=12, gone=True, exitcode=1, raised=known.pop("error", ""))
    summary = "rank 3 exited with code 1"
    return RankEvidence(**{"summary": summary, "note": note, "cycle": 0, "took_s": 0.1, **known})
