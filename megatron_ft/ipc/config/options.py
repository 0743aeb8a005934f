"""The options that ``ft_launcher`` has beyond torchrun's; what they add up to is `ipc.config.resolved`' work."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from megatron_ft.core.config.fields import FIELDS, nearest, plain
from megatron_ft.core.config.reference_names import REFERENCE_FIELDS, REFERENCE_OPTIONS
from megatron_ft.ipc.config.yaml_file import FaultToleranceConfig
from megatron_ft.ipc.files.event_log import DEFAULT_LOG_MAX_BYTES

RESTART_POLICIES = ("any-failed", "min-healthy")
DEFAULT_TERM_TIMEOUT = 1800.0
DEFAULT_WORKERS_STOP_TIMEOUT = 5.0
DEFAULT_PRELOAD_TIMEOUT = 60.0
DEFAULT_NODE_HEALTH_TIMEOUT = 60.0
DEFAULT_MAX_NO_PROGRESS_CYCLES = 3
DEFAULT_NO_RESTART_EXIT_CODE = 93


def add_ft_options(parser: argparse.ArgumentParser) -> None:
    """Add the group "fault tolerance" to torchrun's parser.

    Every option has several spellings, of which ``--help`` shows one. Values stay texts: `read_ft_options`
    judges them, so that a bad one gives one line instead of a usage dump.
    """
    group = parser.add_argument_group(
        "fault tolerance", "Durations are seconds, null means no limit. Options win over the YAML file."
    )
    _add_field_options(group)
    _add_file_options(group)
    _add_restart_options(group)
    _add_membership_options(group)
    _add_health_options(group)
    _add_progress_options(group)
    _add_preload_options(group)
    _add_watching_options(group)
    for name in (*REFERENCE_FIELDS, *REFERENCE_OPTIONS):
        # some are options of ours, too, in some of their spellings
        spellings = [word for word in _field_spellings(name) if word not in parser._option_string_actions]
        if name != "restart_policy":
            group.add_argument(*spellings, action=_Ignore, help=argparse.SUPPRESS)
    _refuse_abbreviations(parser, group)


def with_hint(message: str, parser: argparse.ArgumentParser) -> str:
    """What argparse has to complain about, with the option that was probably meant."""
    prefix, see = "unrecognized arguments: ", f" (see {parser.prog} --help)"
    if not message.startswith(prefix):
        return message if "training_script" not in message else message + see
    name = message.removeprefix(prefix).split()[0].partition("=")[0]
    # of several spellings that are as near, the last one is proposed: the one that --help shows
    actions = [item for item in parser._option_string_actions.items() if item[0].startswith("--")]
    known = [option for option, action in sorted(actions, key=lambda item: item[1].help != argparse.SUPPRESS)]
    hint = nearest(name, known)
    return message + (hint if "did you mean" in hint else see)


def as_text(value: object) -> str:
    """A value as the command line writes it."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return ",".join(f"{name}:{as_text(timeout)}" for name, timeout in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _refuse_abbreviations(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> None:
    """Of the options of ``group``, that is. argparse takes any beginning that only one option has: with ours beside
    them, what torchrun takes for one of its own (``--te 3``) would be ambiguous, or become ours.
    """
    find = parser._get_option_tuples
    ours = {id(action) for action in group._group_actions}

    def find_others(text: str) -> list[Any]:
        return [found for found in find(text) if id(found[0]) not in ours]

    parser._get_option_tuples = find_others  # type: ignore[assignment, method-assign]


def _add_field_options(group: argparse._ArgumentGroup) -> None:
    defaults = FaultToleranceConfig()
    for name, spec in FIELDS.items():
        default = f"Default: {as_text(plain(name, getattr(defaults, name))) or 'none'}."
        _add(group, _field_spellings(name), dest=f"ft_{name}", metavar="VALUE", help=f"{spec.help} {default}")


def _add_file_options(group: argparse._ArgumentGroup) -> None:
    _add(
        group,
        ["--fault-tol-cfg-path", "--fault_tol_cfg_path", "--ft-cfg-path", "--ft_cfg_path", "--ft-cfg_path"],
        dest="ft_cfg_path",
        metavar="FILE",
        default=os.environ.get("PET_FT_CFG_PATH"),
        help="YAML file with a fault_tolerance section, at the top or nested in any other section.",
    )
    _add(
        group,
        ["--ignore-missing-fault-tol-cfg", "--ignore_missing_fault_tol_cfg", "--ft-ignore-missing-cfg"],
        dest="ft_ignore_missing_cfg",
        action="store_true",
        default=False,
        help="Go on with defaults if that file or its fault_tolerance section is missing.",
    )
    _add(
        group,
        ["--ft-log-dir", "--ft_log_dir"],
        dest="ft_log_dir",
        metavar="DIR",
        help="Directory of the event logs. Default: beside torchrun's --log-dir, else under the user's state "
        "directory.",
    )
    _add(
        group,
        ["--ft-log-max-bytes", "--ft_log_max_bytes"],
        dest="ft_log_max_bytes",
        metavar="BYTES",
        help="What the event logs of one process (the launcher's, each monitor's) may take; the oldest records go "
        f"first, evidence never. 0 is no bound. Default: {DEFAULT_LOG_MAX_BYTES}.",
    )


def _add_restart_options(group: argparse._ArgumentGroup) -> None:
    _add(
        group,
        ["--restart-policy", "--restart_policy", "--ft-restart-policy", "--ft_restart_policy"],
        dest="ft_restart_policy",
        metavar="POLICY",
        help=f"When to restart: {' or '.join(RESTART_POLICIES)}. Default: {RESTART_POLICIES[0]}.",
    )
    _add(
        group,
        ["--term-timeout", "--term_timeout"],
        dest="ft_term_timeout",
        metavar="SECONDS",
        default=os.environ.get("PET_TERM_TIMEOUT"),
        help="From SIGTERM to SIGKILL for the ranks when the launcher is asked to stop. "
        f"Default: {DEFAULT_TERM_TIMEOUT:g}.",
    )
    _add(
        group,
        ["--workers-stop-timeout", "--workers_stop_timeout"],
        dest="ft_workers_stop_timeout",
        metavar="SECONDS",
        default=os.environ.get("PET_WORKERS_STOP_TIMEOUT"),
        help="From SIGTERM to SIGKILL for the ranks when the launcher restarts them. "
        f"Default: {DEFAULT_WORKERS_STOP_TIMEOUT:g}, and a tenth of a second where one of them has failed, because "
        "nothing can be saved together any more.",
    )


def _add_membership_options(group: argparse._ArgumentGroup) -> None:
    _add(
        group,
        ["--ft-scale-up-at-once", "--ft_scale_up_at_once"],
        dest="ft_scale_up_at_once",
        action="store_true",
        default=False,
        help="Restart all ranks as soon as a node waits to join, as torchrun does. Without, it stands by for the next "
        "restart.",
    )


def _add_health_options(group: argparse._ArgumentGroup) -> None:
    _add(
        group,
        ["--ft-node-health-command", "--ft_node_health_command"],
        dest="ft_node_health_command",
        metavar="COMMAND",
        help="A shell command that is run before this node joins a round. If it doesn't end with 0 the node stands "
        "aside, and it is tried again. Default: none.",
    )
    _add(
        group,
        ["--ft-node-health-timeout", "--ft_node_health_timeout"],
        dest="ft_node_health_timeout",
        metavar="SECONDS",
        help="It is killed if it takes longer, and has failed; null: no limit. "
        f"Default: {DEFAULT_NODE_HEALTH_TIMEOUT:g}.",
    )


def _add_progress_options(group: argparse._ArgumentGroup) -> None:
    _add(
        group,
        ["--ft-max-no-progress-cycles", "--ft_max_no_progress_cycles"],
        dest="ft_max_no_progress_cycles",
        metavar="N",
        help="End the job when so many failed cycles in a row got no further than the job has been, neither in "
        "iterations nor in the iteration they went on from; 0 never does. Only for jobs that tell their iterations. "
        f"Default: {DEFAULT_MAX_NO_PROGRESS_CYCLES}.",
    )
    _add(
        group,
        ["--ft-no-restart-exit-code", "--ft_no_restart_exit_code"],
        dest="ft_no_restart_exit_code",
        metavar="CODE",
        help="The launcher's exit code then, for schedulers that would start the job again. (94 asks "
        "them to: too few nodes are left to go on.) "
        f"Default: {DEFAULT_NO_RESTART_EXIT_CODE}.",
    )
    _add(
        group,
        ["--ft-stopped-exit-code", "--ft_stopped_exit_code"],
        dest="ft_stopped_exit_code",
        metavar="CODE",
        help="The launcher's exit code when it was asked to stop, so that a scheduler can tell that from a finished "
        "training. Default: 0 if all ranks then ended with 0, else 1; 130 for SIGINT.",
    )


def _add_preload_options(group: argparse._ArgumentGroup) -> None:
    _add(
        group,
        ["--ft-preload", "--ft_preload"],
        dest="ft_preload",
        metavar="MODULES",
        default=os.environ.get("PET_FT_PRELOAD"),
        help="Modules, as in a,b.c, to import before the script's first line. The script itself is run ahead, once for "
        "all ranks of the node, to where they begin to differ. none: it isn't, ranks start as fresh interpreters.",
    )
    _add(
        group,
        ["--ft-preload-timeout", "--ft_preload_timeout"],
        dest="ft_preload_timeout",
        metavar="SECONDS",
        help="A script that runs ahead for longer starts as fresh interpreters instead. "
        f"Default: {DEFAULT_PRELOAD_TIMEOUT:g}.",
    )


def _add_watching_options(group: argparse._ArgumentGroup) -> None:
    _add(
        group,
        ["--ft-startup-timeout", "--ft_startup_timeout"],
        dest="ft_startup_timeout",
        metavar="SECONDS",
        help="From the start of a rank's process to its init_workload_monitoring(); a rank that takes longer is ended "
        "as hung. Default: none.",
    )
    _add(
        group,
        ["--ft-exit-timeout", "--ft_exit_timeout"],
        dest="ft_exit_timeout",
        metavar="SECONDS",
        help="From a rank's shutdown_workload_monitoring() to the end of its process; a rank that takes longer is "
        "ended as hung, unless other ranks of the node have exited with 0 and none is still at work: then it counts as "
        "finished. Default: none.",
    )
    _add(
        group,
        ["--ft-observe-only", "--ft_observe_only"],
        dest="ft_observe_only",
        action="store_true",
        default=False,
        help="Tell and log which rank would have been ended as hung, and end none.",
    )
    _add(
        group,
        ["--ft-forward-signals", "--ft_forward_signals"],
        dest="ft_forward_signals",
        metavar="SIGNALS",
        help="Signals that are passed on to the ranks and end nothing, for example SIGUSR1,SIGUSR2. Default: none.",
    )


def _field_spellings(name: str) -> list[str]:
    prefixes = ("--ft-param-", "--ft-", "--ft_param_", "--ft_")
    return list(dict.fromkeys(p + n for p in prefixes for n in (name, name.replace("_", "-"))))


def _add(group: argparse._ArgumentGroup, spellings: Sequence[str], *, help: str, **options: Any) -> None:  # noqa: A002
    group.add_argument(spellings[0], help=help, **options)
    options.pop("metavar", None)
    group.add_argument(*spellings[1:], help=argparse.SUPPRESS, **options)


class _Ignore(argparse.Action):
    """Remembers the option's name as it was written, not its value."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, "ft_ignored_options", default=None, **{**options, "type": str})

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        ignored = getattr(namespace, self.dest) or []
        setattr(namespace, self.dest, [*ignored, option_string])
