"""`megatron-ft report`: tables, and on request a page or JSON, of the runs in a log directory.

Nothing heavy is imported before the command runs: `megatron-ft pause` goes through this module, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from megatron_ft.errors import ConfigError
from megatron_ft.link.base.codec import to_builtins

if TYPE_CHECKING:
    from megatron_ft.cli.analysis.analysis import Analysis
    from megatron_ft.cli.analysis.interval_lengths import Interval

_NOTHING_FOUND = 1
_INTERVAL = (
    *("name", "timeout_s", "count", "longest_s", "longest_rank", "longest_cycle", "hangs", "left_out_s"),
    *("margin", "suggested_s"),
)
"""Fields of an element of ``timeouts`` in the JSON."""
_DESCRIPTION = """\
Say what happened in each run whose event logs are in a directory: its cycles and why they ended, how soon that was
detected and the job trained again, where the time went, and the timeouts beside the intervals they time.
It reads only these logs, offline; they may still be written to, come from several nodes, or be cut off."""
_EPILOG = """\
Goodput is the share of productive steps in the time from the start of the launchers to their end; below it is where
the rest went. It is a dash where no iterations were recorded.

The margin is how many times the longest observed interval fits into its timeout. A section that never ended because
its rank hung, was ended or died isn't an observed interval.

Of several runs in a directory, each has its tables (and is an element of the JSON), oldest first; the page
shows the last one. --run chooses another, for all of them. --suggest-timeouts takes all of them together."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="what happened, cycle by cycle, as tables or a page",
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
    parser.add_argument("--json", action="store_true", help="print the summary as JSON, instead of tables")
    parser.add_argument(
        "--suggest-timeouts", action="store_true", help="print only timeouts from the observed intervals, as YAML"
    )
    parser.add_argument("--run", dest="run_number", type=int, metavar="N", help="only the Nth run; 1 is the oldest")
    parser.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> int:
    from megatron_ft.cli.analysis.analysis import analyze
    from megatron_ft.cli.analysis.interval_lengths import suggestion
    from megatron_ft.cli.logs.runs import log_directory, runs_in

    runs = runs_in(args.log_dirs)
    if not runs:
        where = "give the directory that ft_launcher names as 'logs:'"
        print(f"megatron-ft: no event logs in {', '.join(args.log_dirs)}; {where}", file=sys.stderr)
        return _NOTHING_FOUND
    if args.run_number is not None:
        if not 1 <= args.run_number <= len(runs):
            there = "is 1 run" if len(runs) == 1 else f"are {len(runs)} runs"
            raise ConfigError(f"--run {args.run_number}: there {there}, from 1")
        runs = runs[args.run_number - 1 : args.run_number]
    together: dict[str, Interval] | None = {} if args.suggest_timeouts else None
    analyses = [analyze(run, together) for run in runs]
    if together is not None:
        lines, has_timeouts = suggestion(together)
        print("\n".join(lines))
        return 0 if has_timeouts else _NOTHING_FOUND
    written = ""
    if args.html is not None:
        from megatron_ft.cli.render.html_page import write_page

        try:  # before anything is printed: `| head` ends this process
            left_out = write_page(analyses[-1], [log_directory(each) for each in args.log_dirs], args.html)
        except OSError as error:
            raise ConfigError(f"{args.html} can't be written: {error.strerror}") from None
        written = f"wrote {args.html}{left_out}"
    if args.json:
        print(json.dumps([summary_document(each) for each in analyses], indent=2))
    else:
        from megatron_ft.cli.render.report_tables import print_report

        for each in analyses:
            print_report(each)
    if written:
        print(written, file=sys.stderr if args.json else sys.stdout)  # stdout must hold nothing but JSON
    return 0


def summary_document(analysis: Analysis) -> dict[str, Any]:
    """Return one run as JSON: the tables' values, unrounded.

    Times are seconds (``_s``) or wall ns since the epoch (``_ns``); null is unknown. Fields may be added; existing ones
    keep their meaning.
    """
    run, timeline, accounting = analysis.run, analysis.timeline, analysis.run.accounting
    goodput = accounting.goodput
    cycles = []
    for of in run.cycles:
        cycle = dataclasses.asdict(of)
        cycle["phases_s"] = cycle.pop("phases")
        cause = cycle.pop("cause") and to_builtins(of.cause)
        if of.fault is not None:
            cycle["fault"] = {**to_builtins(of.fault.record), "at_ns": of.fault.at_ns}
        cycle.update({name: cause and cause[name] for name in ("kind", "text", "detail", "rank")})
        cycle["findings"] = [mark.text for mark in timeline.marks_of(of.cycle) if mark.kind == "finding"]
        evidence = [each.record for each in timeline.evidence if each.record.cycle == of.cycle]
        cycle["evidence"] = [{"rank": each.rank, "file": each.file, "summary": each.summary} for each in evidence]
        cycles.append(cycle)
    return {
        "run_id": run.run_id,
        "hosts": run.hosts,
        "world_size": run.world_size,
        "exit_code": run.exit_code,
        "passed_over": run.passed_over,
        "missing_ranks": run.missing_ranks,
        "max_restarts": run.max_restarts,
        "restarts": run.restarts,
        "begin_ns": timeline.begin_ns,
        "end_ns": timeline.end_ns,
        "lost_events": timeline.lost,
        "goodput": None
        if goodput is None
        else {
            "share": goodput.share,
            "total_s": goodput.total_s,
            "seconds": {each.value: seconds for each, seconds in goodput.seconds.items()},
            "iterations": goodput.iterations,
            "redone": goodput.redone,
        },
        "cycles": cycles,
        "reported_hangs": [to_builtins(each) for each in accounting.hangs],
        "slow_ranks": [dataclasses.asdict(each) for each in analysis.slow_ranks],
        "timeouts": [
            {
                **{name: getattr(each, name) for name in _INTERVAL},
                "median_s": each.quantile(0.5),
                "p99_s": each.quantile(0.99),
            }
            for each in analysis.intervals
        ],
    }
