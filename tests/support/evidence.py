"""Evidence on a rank of which little is known."""

from __future__ import annotations

from typing import Any

from megatron_ft.diagnosis.collectives import Collectives
from megatron_ft.diagnosis.evidence import ExitEvidence, HangEvidence, Stacks
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.link.base.process_facts import ProcessFacts

__all__ = ["exit_evidence", "hang_evidence"]


def hang_evidence(**known: Any) -> HangEvidence:
    fields: dict[str, Any] = {
        "note": RankSnapshot(rank=3, host="a", pid=12),
        "cycle": 0,
        "verdict": None,
        "board": None,
        "last_events": (),
        "process": ProcessFacts(),
        "stacks": Stacks(source="faulthandler", threads=()),
        "collectives": Collectives(error="the rank is stopped"),
        "missing": (),
        "took_s": 0.1,
    }
    return HangEvidence(**{**fields, **known})


def exit_evidence(**known: Any) -> ExitEvidence:
    fields: dict[str, Any] = {
        "summary": "rank 3 exited with code 1",
        "rank": 3,
        "local_rank": 0,
        "host": "a",
        "pid": 12,
        "cycle": 0,
        "iteration": None,
        "exit": "code 1",
        "exitcode": 1,
        "error": None,
        "follows_from_another": False,
        "board": None,
        "exception": "",
        "fatal_error": "",
        "stderr": "",
        "missing": (),
        "took_s": 0.1,
    }
    return ExitEvidence(**{**fields, **known})
