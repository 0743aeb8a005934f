"""`megatron-ft replay`: effect of other timeouts on the runs in a log directory."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_ft.cli.render.terminal import check_extra, took
from megatron_ft.core.config.config import ConfigValues, parse_section_timeouts
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.wording import counted

if TYPE_CHECKING:
    from megatron_ft.cli.analysis.analysis import Analysis
    from megatron_ft.cli.analysis.replay import Replayed, ReplayedRule
    from megatron_ft.cli.analysis.timeline import Timeline

_NOTHING_FOUND = 1
_OUT = "out_of_section"
_IN_NONE = "(out of section)"
_LEAST_INTERVALS = 100
"""Intervals of one section, below which nothing is suggested."""
_DESCRIPTION = """\
Play the runs in a log directory again under other timeouts: in which healthy intervals they would have terminated a
rank, and how much sooner (or later) each hang would have been detected. Without --timeouts or --rule, both rules are
shown. It reads only the event logs, offline. Heartbeats are left out."""
_EPILOG = """\
A learned timeout is learned from the logs alone, from nothing, each time the run saved. Before, no rank is judged. A
rank that would have been terminated goes on here, as the log does: what the job would have done instead isn't in it.
The check for progress, which extends most learned timeouts, isn't in the logs either: with a learned timeout, these are
the intervals in which the ranks would have been checked."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "replay",
        help="what other timeouts would have done to runs that are over",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("log_dir", metavar="LOG_DIR", help="the directory that ft_launcher names as 'logs:'")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--timeouts", metavar="NAME:SECONDS,...", help=f"fixed timeouts of sections; {_OUT} is the time in no section"
    )
    which.add_argument("--rule", choices=("budget", "ours", "reference"), help="what this rule would have learned")
    parser.add_argument("--safety-factor", metavar="FACTOR", help="of both rules")
    parser.add_argument("--suggest", action="store_true", help="print the last timeouts as configuration, too")
    parser.add_argument("--png", metavar="FILE", help="draw how long each section took, and the timeouts")
    parser.set_defaults(run=_replay)


def _replay(args: argparse.Namespace) -> int:
    given = {} if args.safety_factor is None else {"safety_factor": _number("safety_factor", args.safety_factor)}
    factor = ConfigValues.from_kwargs(ignore_not_recognized=False, **given).safety_factor
    fixed = None if args.timeouts is None else _fixed(args.timeouts)
    if args.suggest and fixed is not None:
        raise ConfigError("--suggest: a suggestion is learned from the logs, and --timeouts gives the values")
    if args.png is not None:
        check_extra("matplotlib", "--png")
    from megatron_ft.cli.analysis.analysis import analyze
    from megatron_ft.cli.analysis.replay import replay
    from megatron_ft.cli.logs.runs import log_directory, runs_in
    from megatron_ft.cli.render.replay import print_replay

    analyses = [analyze(run) for run in runs_in([log_directory(args.log_dir)])]
    timelines = [each.timeline for each in analyses]
    if not timelines:
        return _NOTHING_FOUND
    wanted = ["timeouts"] if fixed is not None else [args.rule] if args.rule is not None else ["budget", "reference"]
    of_rules: dict[str, list[Replayed]] = {}
    for name in wanted:
        name = "budget" if name == "ours" else name
        rules = _rules(timelines, name, factor, fixed)
        of_rules[name] = [replay(timelines, section, rule) for section, rule in rules.items()]
    suggested: list[str] = []
    if args.suggest:
        suggested = suggestion(*next(iter(of_rules.items())))
    for name, found in of_rules.items():
        print_replay("as given" if name == "timeouts" else f"rule {name}", found)
        print(_cost(analyses, sum(len(each.would_end) for each in found)))
    if args.png is not None:
        _draw(timelines, of_rules, args.png)
    if suggested:
        print("\n".join(["", *suggested]))
    return 0


def _draw(timelines: Sequence[Timeline], of_rules: Mapping[str, Sequence[Replayed]], path: str) -> None:
    from megatron_ft.cli.render.replay import draw_replay

    try:
        draw_replay(timelines, of_rules, path)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from None
    print(f"wrote {path}")


def suggestion(rule: str, found: Sequence[Replayed]) -> list[str]:
    """Return lines for a YAML file, and for the command line. Seconds, rounded up to two figures; None is left out.

    A value that rests on too few intervals is a comment: a section without a timeout ends no rank, one with a timeout
    that is too short ends healthy ones.

    Raises:
        ConfigError: no section has enough intervals.
    """
    counts = {each.name: each.judged + each.unjudged for each in found}
    most = max(counts.values(), default=0)
    if most < _LEAST_INTERVALS:
        raise ConfigError(
            f"--suggest: no section has {_LEAST_INTERVALS} intervals in these logs (the most is {most}), too few to "
            "learn a timeout from: let the job run longer"
        )
    known = {each.name: _rounded_up(each.last_s) for each in found if each.last_s is not None}
    good = {name: seconds for name, seconds in known.items() if counts[name] >= _LEAST_INTERVALS}
    if not good:
        return ["# nothing could be learned from these logs"]
    sections = {name: seconds for name, seconds in good.items() if name != _IN_NONE}
    lines = [f"# by the rule {rule}", "fault_tolerance:"]
    if sections:
        lines.append("  rank_section_timeouts:")
    for name, seconds in sorted(known.items(), key=lambda pair: pair[0] == _IN_NONE):
        rest_on = f"from {counted(counts[name], 'interval')}"
        indent, key = ("  ", "rank_out_of_section_timeout") if name == _IN_NONE else ("    ", name)
        if name in good:
            lines.append(f"{indent}{key}: {seconds:g}  # {rest_on}")
        else:
            lines.append(f"{indent}# {key}: {seconds:g}  # {rest_on}, too few: choose a longer one")
    together = ",".join(f"{name}:{seconds:g}" for name, seconds in sections.items())
    options = [shlex.quote(f"--ft-rank-section-timeouts={together}")] if sections else []
    if _IN_NONE in good:
        options.append(f"--ft-rank-out-of-section-timeout={good[_IN_NONE]:g}")
    return [*lines, "", " ".join(options)]


def _rounded_up(seconds: float) -> float:
    digit = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return round(math.ceil(round(seconds / digit, 6)) * digit, 9)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--{name.replace('_', '-')} {text!r} is no number") from None


def _fixed(text: str) -> dict[str, float | None]:
    parts = [part for part in text.split(",") if part.strip()]
    out = [part for part in parts if part.rpartition(":")[0].strip() == _OUT]
    found = dict(parse_section_timeouts(",".join(part for part in parts if part not in out)))
    for part in out[:1]:
        # its name can't be a section's
        found[_IN_NONE] = parse_section_timeouts(f"x:{part.rpartition(':')[2]}")["x"]
    if not found or len(out) > 1:
        raise ConfigError(f"--timeouts {text!r}: must be NAME:SECONDS,... with each name once, for example step:60")
    return found


def _rules(
    timelines: Sequence[Timeline], name: str, factor: float, fixed: Mapping[str, float | None] | None
) -> dict[str, ReplayedRule]:
    from megatron_ft.cli.analysis import replay

    sections = replay.sections_of(timelines)
    if fixed is not None:
        unknown = [each for each in fixed if each not in sections]
        if unknown:
            raise ConfigError(f"--timeouts: {unknown} aren't in these logs, which have {sections}")
        return {each: replay.ReplayedRule(fixed[each]) for each in sections if each in fixed}
    return {each: replay.LearnedRule(name, factor) for each in sections}


def _cost(analyses: Sequence[Analysis], ended: int) -> str:
    known = [each for each in analyses if each.goodput is not None]
    failures = sum(cycle.failed for each in known for cycle in each.timeline.cycles)
    if not ended:
        return "no healthy rank would have been terminated"
    restarts = counted(ended, "restart")
    if not failures:
        return f"{restarts} without cause; these logs have no restart to estimate the cost from"
    lost_s = sum(each.goodput.lost_s for each in known if each.goodput is not None) / failures
    return f"{restarts} without cause, about {took(ended * lost_s)}: one cost these runs {took(lost_s)} on average"
