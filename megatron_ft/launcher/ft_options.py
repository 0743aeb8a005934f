"""The options that ``ft_launcher`` has beyond torchrun's, and what they add up to."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ft.core.config import Layer, strict_from_mapping
from megatron_ft.core.config_fields import (
    FIELDS,
    MAX_SECONDS,
    nearest,
    plain,
    show,
)
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.reference_names import REFERENCE_FIELDS, REFERENCE_OPTIONS
from megatron_ft.ipc.config_file import FaultToleranceConfig, FileSection, command_line_values, read_section

RESTART_POLICIES = ("any-failed", "min-healthy")
DEFAULT_TERM_TIMEOUT = 1800.0
DEFAULT_WORKERS_STOP_TIMEOUT = 5.0


def add_ft_options(parser: argparse.ArgumentParser) -> None:
    """Add the group "fault tolerance" to torchrun's parser.

    Every option has several spellings, of which ``--help`` shows one. Values stay texts: `read_ft_options`
    judges them, so that a bad one gives one line instead of a usage dump.
    """
    group = parser.add_argument_group(
        "fault tolerance", "Durations are seconds, null means no limit. Options win over the YAML file."
    )
    defaults = FaultToleranceConfig()
    for name, spec in FIELDS.items():
        default = f"Default: {_as_text(plain(name, getattr(defaults, name))) or 'none'}."
        _add(group, _field_spellings(name), dest=f"ft_{name}", metavar="VALUE", help=f"{spec.help} {default}")
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
        f"Default: {DEFAULT_WORKERS_STOP_TIMEOUT:g}.",
    )
    _add(
        group,
        ["--ft-log-dir", "--ft_log_dir"],
        dest="ft_log_dir",
        metavar="DIR",
        help="Directory of the event logs. Default: beside torchrun's --log-dir, else under the user's state "
        "directory.",
    )
    for name in (*REFERENCE_FIELDS, *REFERENCE_OPTIONS):
        if name != "restart_policy":  # which is an option of ours too
            group.add_argument(*_field_spellings(name), action=_Ignore, help=argparse.SUPPRESS)


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


@dataclass(frozen=True, kw_only=True)
class ResolvedOptions:
    """What the options and the YAML file add up to. Durations are seconds."""

    config: FaultToleranceConfig
    sources: dict[str, tuple[Any, str]]  # field -> (JSON-able value, "default", "command line" or "ft.yaml:12")
    warnings: list[str]
    restart_policy: str
    term_timeout: float
    workers_stop_timeout: float
    workers_stop_timeout_was_set: bool
    log_dir: str | None

    def sources_for_log(self) -> dict[str, dict[str, Any]]:
        """`sources` for an event log."""
        return {name: {"value": value, "source": source} for name, (value, source) in self.sources.items()}

    def summary(self) -> str:
        """One line: the values that aren't defaults, each with its source."""
        told = [
            f"{name}={_as_text(value)} ({source})"
            for name, (value, source) in self.sources.items()
            if source != "default"
        ]
        return f"configuration: {', '.join(told)}; else defaults" if told else "configuration: all defaults"


def read_ft_options(namespace: argparse.Namespace) -> ResolvedOptions:
    """Judge the parsed options and the YAML file they name. Raises ConfigError, one line.

    Precedence: command line, then YAML file, then defaults. Unlike `FaultToleranceConfig.from_args`, unknown
    keys in the file are refused, and nothing at all is fine: all defaults.
    """
    warnings: list[str] = []
    given = command_line_values(namespace)
    section = _read_file(namespace, bool(given), warnings)
    ignored = list(dict.fromkeys(getattr(namespace, "ft_ignored_options", None) or []))
    layers: list[Layer] = []
    if section is not None:
        values, foreign = strict_from_mapping(section.values, section.where)
        layers.append((values, section.where))
        ignored += [f"{name} ({section.where(name)})" for name in foreign]
    layers.append((given, lambda _name: "command line"))
    config, sources = FaultToleranceConfig.resolve(*layers)
    if ignored:
        warnings.append(f"ignored, because only nvidia-resiliency-ext knows it: {', '.join(ignored)}")
    if config.safety_factor < 1:
        warnings.append(
            f"safety_factor={config.safety_factor:g} is below 1: "
            "learned timeouts will be shorter than the longest interval that was seen"
        )
    stop_timeout = namespace.ft_workers_stop_timeout
    return ResolvedOptions(
        config=config,
        sources=sources,
        warnings=warnings,
        restart_policy=_restart_policy(namespace.ft_restart_policy),
        term_timeout=_seconds("--term-timeout", namespace.ft_term_timeout, DEFAULT_TERM_TIMEOUT),
        workers_stop_timeout=_seconds("--workers-stop-timeout", stop_timeout, DEFAULT_WORKERS_STOP_TIMEOUT),
        workers_stop_timeout_was_set=stop_timeout is not None,
        log_dir=namespace.ft_log_dir,
    )


def _read_file(namespace: argparse.Namespace, options_given: bool, warnings: list[str]) -> FileSection | None:
    path, may_be_missing = namespace.ft_cfg_path, namespace.ft_ignore_missing_cfg
    if path is None:
        return None
    if may_be_missing and not os.path.lexists(path):
        warnings.append(f"there is no file {path}: going on without it")
        return None
    section = read_section(path)
    if section is None and not options_given:
        lacks = f"{path}: there is no 'fault_tolerance' section"
        if not may_be_missing:
            raise ConfigError(f"{lacks}, and no option of the command line sets anything")
        warnings.append(f"{lacks}: going on with defaults")
    return section


def _restart_policy(given: str | None) -> str:
    if given is None:
        return RESTART_POLICIES[0]
    if given not in RESTART_POLICIES:
        raise ConfigError(f"--restart-policy {show(given)}: unknown policy{nearest(given, RESTART_POLICIES)}")
    return given


def _seconds(option: str, given: str | None, default: float) -> float:
    if given is None:
        return default
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_SECONDS:  # false for nan too
        raise ConfigError(f"{option} {show(given)}: must be a number of seconds from 0 to {MAX_SECONDS:.0e}")
    return seconds


def _as_text(value: object) -> str:
    """A value as the command line writes it."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return ",".join(f"{name}:{_as_text(timeout)}" for name, timeout in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)
