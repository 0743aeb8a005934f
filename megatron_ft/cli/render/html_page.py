"""The page: one file with everything in it, which loads nothing from anywhere; needs plotly (the extra `report`)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from megatron_ft.cli.analysis.analysis import Analysis
from megatron_ft.cli.analysis.goodput import DEFINITION
from megatron_ft.cli.analysis.raster import state_names
from megatron_ft.cli.render import theme
from megatron_ft.cli.render.analysis_table import INTERVAL_COLUMNS, goodput_line, interval_notes, interval_row
from megatron_ft.cli.render.cycles_table import COLUMNS, cycle_row
from megatron_ft.cli.render.evidence_texts import EvidenceText, read_evidence
from megatron_ft.cli.render.html_figures import distributions_figure, timeline_figure
from megatron_ft.cli.render.html_template import PAGE
from megatron_ft.ipc.files.atomic_write import write_whole

__all__ = ["page", "write_page"]

_MOST_MARKS = 2000


def write_page(analysis: Analysis, log_dirs: str | Sequence[str], path: str) -> str:
    """Write the page; evidence is read from ``log_dirs``.

    Returns:
        "", or what was left out, in words.

    Raises:
        OSError: the file can't be written.
    """
    evidence = read_evidence(log_dirs, analysis.timeline.evidence, _culprits(analysis))
    text = page(analysis, evidence)
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w", encoding="utf-8") as file:  # a pipe can't be replaced
            file.write(text)
    else:
        write_whole(path, text)
    cut = sum(bool(each.note) for each in evidence)
    return f" ({cut} of {len(evidence)} pieces of evidence are cut or missing in it, and say so)" if cut else ""


def _culprits(analysis: Analysis) -> set[tuple[int | None, int | None]]:
    """Ranks that a verdict, a finding or the cause of a cycle's end names, each with its cycle."""
    named = {(mark.rank, mark.cycle) for mark in analysis.timeline.marks if mark.kind in ("verdict", "finding")}
    return named | {(cycle.rank, cycle.cycle) for cycle in analysis.summary.cycles}


def page(analysis: Analysis, evidence: Sequence[EvidenceText]) -> str:
    """The text of the page."""
    timeline = analysis.timeline
    distributions = distributions_figure(analysis)
    parts = {
        "title": escape(theme.title(timeline)),
        "goodput": escape(goodput_line(analysis.goodput)),
        "definition": escape(DEFINITION),
        "data": _json(_data(analysis, evidence)),
        "timeline": _figure(timeline_figure(analysis), "timeline", with_library=True),
        "cycles": _table((*COLUMNS, ""), [(*cycle_row(cycle), "") for cycle in analysis.summary.cycles], "cycles"),
        "timeouts": _table(INTERVAL_COLUMNS, map(interval_row, analysis.intervals), "timeouts"),
        "notes": "".join(f'<p class="hint">{escape(note)}</p>' for note in interval_notes(analysis)),
        "distributions": (
            "<p>No section was observed from its beginning to its end.</p>"
            if distributions is None
            else _figure(distributions, "distributions", with_library=False)
        ),
    }
    text = PAGE
    # one pass over the template, not over what was put in: a text of a log can't name a place
    pieces = text.split("@@")
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def _figure(figure: Any, name: str, *, with_library: bool) -> str:
    return str(
        figure.to_html(
            full_html=False,
            include_plotlyjs=with_library,
            div_id=name,
            config={
                "scrollZoom": with_library,  # over the small figures, the wheel moves the page
                "displaylogo": False,
                "responsive": True,
                "plotlyServerURL": "",
                # these and no others: some would share the figure with plotly's servers
                "modeBarButtons": [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"], ["toImage"]],
            },
        )
    )


def _table(columns: Iterable[str], rows: Iterable[Sequence[str]], name: str) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<table id="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _data(analysis: Analysis, evidence: Sequence[EvidenceText]) -> dict[str, Any]:
    """What the page's script needs; seconds since the beginning of the timeline."""
    timeline = analysis.timeline

    def since(at_ns: int) -> float:
        return (at_ns - timeline.begin_ns) / 1e9

    return {
        "begin_ms": timeline.begin_ns / 1e6,
        "length": since(timeline.end_ns),
        "ranks": timeline.ranks,
        "states": state_names(timeline.names),
        "cycles": [
            {"number": each.number, "begin": since(each.begin_ns), "end": since(each.end_ns), "text": each.text}
            for each in timeline.cycles
        ],
        "windows": {each.cycle: [since(each.begin_ns), since(each.end_ns)] for each in analysis.windows},
        "failures": [
            {"number": each.number, "cycle": each.cycle, "rank": each.rank, "text": each.text}
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
    """JSON that can't end the script element it stands in."""
    return json.dumps(document).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
