"""`megatron-ft report`: tables, and on request pictures, a trace and JSON, of the runs in a log directory.

Nothing heavy is imported before the command runs: `megatron-ft pause` goes through this module, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_ft.cli.render.terminal import check_extra, progress_bar
from megatron_ft.core.codec import to_builtins
from megatron_ft.core.errors import ConfigError

if TYPE_CHECKING:
    from megatron_ft.cli.analysis.analysis import Analysis
    from megatron_ft.cli.logs.runs import RunLogs

_NOTHING_FOUND = 1
_DESCRIPTION = """\
Say what happened in each run whose event logs are in a directory: its cycles and why they ended, how soon that was
detected and the job trained again, where the time went, and the timeouts beside the intervals they time.
It reads only these logs, offline; they may still be written to, come from several nodes, or be cut off."""
_EPILOG = """\
Goodput is the share of productive steps in the time from the start of the launchers to their end; below it is where
the rest went. It is a dash where no iterations were recorded.

The margin is how many times the longest observed interval fits into its timeout. A section that never ended because
its rank hung, was ended or died isn't an observed interval.

Of several runs in a directory, each has its tables (and is an element of the JSON), oldest first; the pictures and the
trace show the last one. --run chooses another, for all of them. --suggest-timeouts takes all of them together."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="what happened, cycle by cycle; pictures and a trace",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "log_dirs",
        metavar="LOG_DIR",
        nargs="+",
        help="the directory that ft_launcher names as 'logs:'; of several nodes with one each, all of them",
    )
    parser.add_argument("--html", metavar="FILE", help="write one page with everything; it loads nothing")
    parser.add_argument("--png", metavar="FILE", help="write the timeline of all ranks as a picture")
    parser.add_argument("--trace", metavar="FILE", help="write a trace for ui.perfetto.dev or chrome://tracing")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON, instead of tables")
    parser.add_argument(
        "--suggest-timeouts", action="store_true", help="print only timeouts from the observed intervals, as YAML"
    )
    parser.add_argument("--run", dest="run_number", type=int, metavar="N", help="only the Nth run; 1 is the oldest")
    parser.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> int:
    from megatron_ft.cli.logs.runs import log_directory, runs_in

    if args.png is not None:  # before minutes are spent on reading
        check_extra("matplotlib", "--png")
    args.log_dirs = [log_directory(each) for each in args.log_dirs]
    gc.disable()  # it would look through millions of objects that are all in use: a fifth of the processor time
    try:
        runs = runs_in(args.log_dirs, progress_bar)
        if not runs:
            return _NOTHING_FOUND
        chosen = _chosen(runs, args.run_number)
        return _suggest(chosen) if args.suggest_timeouts else _write_all(args, chosen)
    finally:
        gc.enable()


def _chosen(runs: Sequence[RunLogs], number: int | None) -> Sequence[RunLogs]:
    if number is None:
        return runs
    if not 1 <= number <= len(runs):
        raise ConfigError(f"--run {number}: there {'is 1 run' if len(runs) == 1 else f'are {len(runs)} runs'}, from 1")
    return runs[number - 1 : number]


def _suggest(runs: Sequence[RunLogs]) -> int:
    from megatron_ft.cli.analysis.analysis import analyze
    from megatron_ft.cli.analysis.suggestion import suggestion

    lines, has_timeouts = suggestion([analyze(run).timeline for run in runs])
    print("\n".join(lines))
    return 0 if has_timeouts else _NOTHING_FOUND


def _write_all(args: argparse.Namespace, runs: Sequence[RunLogs]) -> int:
    from megatron_ft.cli.analysis.analysis import analyze

    outputs = [(option, getattr(args, option)) for option in ("html", "png", "trace") if getattr(args, option)]
    written = []  # before anything is printed: `| head` ends this process
    with progress_bar("analysing and drawing", len(runs) + len(outputs)) as advance:
        analyses = []
        for run in runs:
            analyses.append(analyze(run))
            advance(1)
        for option, path in outputs:
            try:
                note = _write(option, path, analyses[-1], args.log_dirs)
            except OSError as error:
                raise ConfigError(f"{path} can't be written: {error.strerror}") from None
            written.append(f"wrote {path}{note}")
            advance(1)
    _print(analyses, as_json=args.json)
    for line in written:
        print(line, file=sys.stderr if args.json else sys.stdout)  # stdout must hold nothing but JSON
    return 0


def _print(analyses: Sequence[Analysis], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([summary_document(each) for each in analyses], indent=2))
        return
    from megatron_ft.cli.render.report_tables import print_analysis, print_run

    for each in analyses:
        print_run(each.summary)
        print_analysis(each)


def summary_document(analysis: Analysis) -> dict[str, Any]:
    """Return one run as JSON: the tables' values, unrounded.

    Times are seconds (``_s``) or wall ns since the epoch (``_ns``); null is unknown. Fields may be added; existing ones
    keep their meaning.
    """
    run = dataclasses.asdict(analysis.summary)
    accounting = run.pop("accounting")
    for cycle, of in zip(accounting["cycles"], analysis.summary.cycles, strict=True):
        cycle["phases_s"] = cycle.pop("phases")
        cause = cycle.pop("cause") and of.cause
        told = ("kind", "text", "detail", "rank")
        cycle.update(dict.fromkeys(told) if cause is None else {name: to_builtins(cause)[name] for name in told})
        cycle["findings"] = [
            mark.text for mark in analysis.timeline.marks if mark.kind == "finding" and mark.cycle == cycle["cycle"]
        ]
        cycle["evidence"] = [
            {"rank": each.rank, "file": each.file, "summary": each.summary}
            for each in analysis.timeline.evidence
            if each.cycle == cycle["cycle"]
        ]
    return {
        **run,
        "restarts": analysis.summary.restarts,
        "begin_ns": analysis.timeline.begin_ns,
        "end_ns": analysis.timeline.end_ns,
        "lost_events": analysis.timeline.lost,
        "goodput": _goodput(analysis),
        "cycles": accounting["cycles"],
        "reported_hangs": [to_builtins(each) for each in analysis.summary.accounting.hangs],
        "slow_ranks": [dataclasses.asdict(each) for each in analysis.slow_ranks],
        "timeouts": [{**dataclasses.asdict(each), "margin": each.margin} for each in analysis.intervals],
    }


def _goodput(analysis: Analysis) -> dict[str, Any] | None:
    found = analysis.summary.accounting.goodput
    if found is None:
        return None
    return {
        "share": found.share,
        "total_s": found.total_s,
        "seconds": {each.value: seconds for each, seconds in found.seconds.items()},
        "iterations": found.iterations,
        "redone": found.redone,
    }


def _write(option: str, path: str, analysis: Analysis, log_dirs: Sequence[str]) -> str:
    """Write one file. Return what was left out, in words.

    Raises:
        OSError: the file can't be written.
    """
    if option == "html":
        from megatron_ft.cli.render.html_page import write_page

        return write_page(analysis, log_dirs, path)
    if option == "trace":
        from megatron_ft.cli.render.trace import write_trace

        write_trace(analysis.timeline, path)
        return ""
    from megatron_ft.cli.render.png import draw_png

    draw_png(analysis, path)
    return ""
