"""Texts from logs reach the terminal as they are, and nothing in them is obeyed."""

from __future__ import annotations

import io
from pathlib import Path

from megatron_ft.cli.render import report_tables
from tests.support.generated_logs import Fault, GeneratedJob, write_job
from tests.unit.cli.analysis.test_report_cycles import Logs, ended, started
from tests.unit.cli.analysis.test_report_timeline import only


def printed(directory: Path) -> str:
    analysis = only(directory)
    out = io.StringIO()
    report_tables.print_report(analysis, out)
    return out.getvalue()


def test_a_terminal_gets_no_order_from_a_log(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    end = ended(0, "crash", 0, "a\x1b[2Jb\rc\x07d\u202ee\nsecond\x9bline", None)
    logs.write("launcher", (1.0, "cycle_started", started(0, 0)), (2.0, "cycle_ended", end))
    text = printed(tmp_path)
    assert all(char.isprintable() or char == "\n" for char in text)
    assert r"a\x1b[2Jb c\x07d\u202ee " in text
    assert r" second\x9bline " in text


def test_a_name_of_a_section_is_no_order(tmp_path: Path) -> None:
    names = ("setup", "step", "[/red]", "\x1b[31mred")
    fault = Fault(cycle=0, rank=0, iteration=25)
    write_job(tmp_path, GeneratedJob(ranks=2, steps=30, faults=(fault,), sections=names))
    text = printed(tmp_path)
    assert "\x1b" not in text
    assert "│ [/red] " in text
    assert r"│ \x1b[31mred " in text
