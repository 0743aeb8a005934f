"""The page: one self-contained file that loads nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from megatron_ft.cli.analysis.analysis import Analysis
from megatron_ft.cli.analysis.timeline import EvidenceFile
from megatron_ft.cli.render import theme
from megatron_ft.cli.render.html_figures import distributions, timeline_data
from megatron_ft.cli.render.html_template import PAGE
from megatron_ft.cli.render.report_tables import (
    CYCLE_COLUMNS,
    GOODPUT,
    INTERVAL_COLUMNS,
    SLOW_COLUMNS,
    cycle_row,
    goodput_line,
    interval_notes,
    interval_row,
    slow_row,
)
from megatron_ft.ipc.files.atomic_write import write_whole

MOST_BYTES = 64 * 1024
MOST_BYTES_IN_ALL = 1024 * 1024
"""Bytes of evidence in the page."""
_MOST_MARKS = 2000


@dataclass(frozen=True, kw_only=True)
class EvidenceText:
    """One piece of evidence in the page.

    Args:
        note: what is missing of the text, and why; "" if it is complete.
    """

    evidence: EvidenceFile
    text: str
    note: str


def write_page(analysis: Analysis, log_dirs: Sequence[str], path: str) -> str:
    """Write the page; evidence is read from ``log_dirs``.

    Returns:
        What was left out, in words; "" if nothing.

    Raises:
        OSError: the file can't be written.
    """
    # ranks, with their cycle, that a verdict, a finding or the cause of a cycle's end names
    named = {(mark.rank, mark.cycle) for mark in analysis.timeline.marks if mark.kind in ("verdict", "finding")}
    named |= {(cycle.cause.rank, cycle.cycle) for cycle in analysis.summary.cycles if cycle.cause}
    evidence = read_evidence(log_dirs, analysis.timeline.evidence, named)
    text = page(analysis, evidence)
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w", encoding="utf-8") as file:  # a pipe can't be replaced
            file.write(text)
    else:
        write_whole(path, text)
    cut = sum(bool(each.note) for each in evidence)
    return f" ({cut} of {len(evidence)} pieces of evidence are cut or missing in it, and say so)" if cut else ""


def read_evidence(
    log_dirs: Sequence[str],
    found: Sequence[EvidenceFile],
    culprits: Collection[tuple[int | None, int | None]] = (),
) -> list[EvidenceText]:
    """Return the texts in the log directories, up to ``MOST_BYTES_IN_ALL``.

    Args:
        culprits: ranks, each with the cycle, named by a record; their texts come first, then the newest.
    """
    directories = [Path(each) for each in log_dirs]
    left = MOST_BYTES_IN_ALL
    texts = []
    for each in sorted(found, key=lambda each: ((each.rank, each.cycle) not in culprits, -each.at_ns)):
        most = min(MOST_BYTES, left)
        has_it = (directory for directory in directories if (directory / each.file).is_file())
        read, note = _read(next(has_it, directories[0]), each.file, most)
        left -= len(read)
        texts.append(EvidenceText(evidence=each, text=read.decode(errors="replace"), note=note))
    return texts


def _read(log_dir: Path, name: str, most: int) -> tuple[bytes, str]:
    try:
        path = (log_dir / name).resolve()
        # the log may be another user's: it must not put foreign files into a page that is handed around
        if not path.is_relative_to(log_dir.resolve()) or not path.is_file():
            return b"", f"{name} is not a file in the log directory"
        size = path.stat().st_size
        if not most:
            return b"", f"left out: this page holds {MOST_BYTES_IN_ALL >> 20} MiB of evidence already; see {name}"
        with path.open("rb") as file:
            read = file.read(most)
    except (OSError, ValueError) as error:
        return b"", f"{name} can't be read: {error}"
    cut = f"cut after {len(read)} of {size} bytes; see {name}" if size > len(read) else ""
    return read, cut


def page(analysis: Analysis, evidence: Sequence[EvidenceText]) -> str:
    """Return the text of the page."""
    timeline = analysis.timeline
    parts = {
        "title": escape(theme.title(timeline)),
        "goodput": escape(goodput_line(analysis.summary.accounting.goodput)),
        "definition": escape(GOODPUT),
        "data": _json(_data(analysis, evidence)),
        "cycles": _table(
            (*CYCLE_COLUMNS, ""), [(*cycle_row(cycle), "") for cycle in analysis.summary.cycles], "cycles"
        ),
        "timeouts": _table(INTERVAL_COLUMNS, map(interval_row, analysis.intervals), "timeouts"),
        "slow": _slow(analysis),
        "notes": "".join(f'<p class="hint">{escape(note)}</p>' for note in interval_notes(analysis)),
        "distributions": (distributions(analysis) or "<p>No section was observed from its beginning to its end.</p>"),
    }
    # one pass over the template only: a text from a log can't name a placeholder
    pieces = PAGE.split("@@")
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def _slow(analysis: Analysis) -> str:
    if not analysis.slow_ranks:
        return ""
    return f"<h2>Slow ranks</h2>{_table(SLOW_COLUMNS, map(slow_row, analysis.slow_ranks), 'slow')}"


def _table(columns: Iterable[str], rows: Iterable[Sequence[str]], name: str) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table id="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _data(analysis: Analysis, evidence: Sequence[EvidenceText]) -> dict[str, Any]:
    """Return the data of the page's script; seconds since the beginning of the timeline."""
    timeline = analysis.timeline

    def since(at_ns: int) -> float:
        return (at_ns - timeline.begin_ns) / 1e9

    return {
        "begin_ms": timeline.begin_ns / 1e6,
        "length": since(timeline.end_ns),
        "ranks": timeline.ranks,
        **timeline_data(analysis),
        "cycles": [
            {"number": each.number, "begin": since(each.begin_ns), "end": since(each.end_ns), "text": each.text}
            for each in timeline.cycles
        ],
        "windows": {each.cycle: [since(each.begin_ns), since(each.end_ns)] for each in analysis.windows},
        "failures": [
            {"number": each.number, "at": each.at_s, "cycle": each.cycle, "rank": each.rank, "text": each.text}
            for each in analysis.failures
        ],
        "marks": [
            {"at": since(each.at_ns), "cycle": each.cycle, "rank": each.rank, "text": each.text}
            for each in timeline.marks[-_MOST_MARKS:]
        ],
        "evidence": [
            {
                "cycle": each.evidence.cycle,
                "rank": each.evidence.rank,
                "file": each.evidence.file,
                "summary": each.evidence.summary,
                "text": each.text,
                "note": each.note,
            }
            for each in evidence
        ],
    }


def _json(document: Any) -> str:
    """Return JSON that can't end the surrounding script element."""
    return json.dumps(document).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
