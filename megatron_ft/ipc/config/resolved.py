"""What the options of ``ft_launcher`` and the YAML file add up to, and where each value comes from."""

from __future__ import annotations

import argparse
import os
import signal
from dataclasses import dataclass
from typing import Any

from megatron_ft.core.config.config import Layer, describe_ignored, strict_from_mapping
from megatron_ft.core.config.fields import MAX_SECONDS, nearest, show
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.run_ahead import parse_preload
from megatron_ft.ipc.config.options import (
    DEFAULT_MAX_NO_PROGRESS_CYCLES,
    DEFAULT_NO_RESTART_EXIT_CODE,
    DEFAULT_NODE_HEALTH_TIMEOUT,
    DEFAULT_PRELOAD_TIMEOUT,
    DEFAULT_TERM_TIMEOUT,
    DEFAULT_WORKERS_STOP_TIMEOUT,
    RESTART_POLICIES,
    as_text,
)
from megatron_ft.ipc.config.yaml_file import FaultToleranceConfig, FileSection, command_line_values, read_section
from megatron_ft.ipc.files.event_log import DEFAULT_LOG_MAX_BYTES

_NOT_FORWARDED = frozenset(
    {
        *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGCONT),  # nobody can pass them on
        *(signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGPIPE, signal.SIGABRT),  # stops and faults
        *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS),
    }
)


@dataclass(frozen=True, kw_only=True)
class ResolvedOptions:
    """What the options and the YAML file add up to. Durations are seconds."""

    config: FaultToleranceConfig
    sources: dict[str, tuple[Any, str]]  # field -> (JSON-able value, "default", "command line" or "ft.yaml:12")
    warnings: list[str]
    restart_policy: str
    scale_up_at_once: bool
    """A node that waits to join ends a healthy cycle."""
    node_health_command: str | None
    """Run before the node joins a round."""
    node_health_timeout: float | None
    term_timeout: float
    workers_stop_timeout: float
    workers_stop_timeout_was_set: bool
    log_dir: str | None
    log_max_bytes: int
    max_no_progress_cycles: int
    no_restart_exit_code: int
    stopped_exit_code: int | None
    """None: by how the ranks ended."""
    startup_timeout: float | None
    """From the start of a rank's process to the start of its monitoring."""
    exit_timeout: float | None
    """From the end of a rank's monitoring to the end of its process."""
    observe_only: bool
    """Hung ranks are told of, none is ended."""
    forward_signals: tuple[signal.Signals, ...]
    preload: tuple[str, ...] | None
    """Modules that are imported once for all ranks of the node; None: ranks aren't forked."""
    preload_timeout: float
    """How long the import of one of them may take."""
    options: dict[str, tuple[Any, str]]
    """The launcher's own options by name ("term-timeout"): (JSON-able value, source)."""

    def sources_for_log(self) -> dict[str, dict[str, Any]]:
        """`sources` and `options` for an event log."""
        everything = {**self.sources, **self.options}
        return {name: {"value": value, "source": source} for name, (value, source) in everything.items()}

    def summary(self) -> str:
        """One line: the values that aren't defaults, each with its source (the log directory has its own line)."""
        told = [
            f"{name}={as_text(value)} ({source})"
            for name, (value, source) in [*self.sources.items(), *self.options.items()]
            if source != "default" and name != "ft-log-dir"
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
    foreign_names = list(dict.fromkeys(getattr(namespace, "ft_ignored_options", None) or []))
    layers: list[Layer] = []
    if section is not None:
        values, foreign = strict_from_mapping(section.values, section.where)
        layers.append((values, section.where))
        foreign_names += [f"{name} ({section.where(name)})" for name in foreign]
    layers.append((given, lambda _name: "command line"))
    config, sources = FaultToleranceConfig.resolve(*layers)
    if foreign_names:
        warnings.append(describe_ignored(foreign_names))
    if config.safety_factor < 1:
        warnings.append(
            f"safety_factor={config.safety_factor:g} is below 1: "
            "learned timeouts will be shorter than the longest interval that was seen"
        )
    ours: dict[str, Any] = {
        "restart-policy": _restart_policy(namespace.ft_restart_policy),
        "term-timeout": _seconds("--term-timeout", namespace.ft_term_timeout, DEFAULT_TERM_TIMEOUT),
        "workers-stop-timeout": _seconds(
            "--workers-stop-timeout", namespace.ft_workers_stop_timeout, DEFAULT_WORKERS_STOP_TIMEOUT
        ),
        "ft-scale-up-at-once": bool(namespace.ft_scale_up_at_once),
        "ft-node-health-command": _command("--ft-node-health-command", namespace.ft_node_health_command),
        "ft-node-health-timeout": _limit(
            "--ft-node-health-timeout", namespace.ft_node_health_timeout, DEFAULT_NODE_HEALTH_TIMEOUT
        ),
        "ft-max-no-progress-cycles": _whole(
            "--ft-max-no-progress-cycles",
            namespace.ft_max_no_progress_cycles,
            DEFAULT_MAX_NO_PROGRESS_CYCLES,
            range(10**6),
        ),
        "ft-no-restart-exit-code": _whole(
            "--ft-no-restart-exit-code",
            namespace.ft_no_restart_exit_code,
            DEFAULT_NO_RESTART_EXIT_CODE,
            range(1, 256),
        ),
        "ft-stopped-exit-code": None
        if namespace.ft_stopped_exit_code is None
        else _whole("--ft-stopped-exit-code", namespace.ft_stopped_exit_code, 0, range(256)),
        "ft-startup-timeout": _limit("--ft-startup-timeout", namespace.ft_startup_timeout),
        "ft-exit-timeout": _limit("--ft-exit-timeout", namespace.ft_exit_timeout),
        "ft-observe-only": bool(namespace.ft_observe_only),
        "ft-forward-signals": _forward_signals(namespace.ft_forward_signals),
        "ft-preload": parse_preload(namespace.ft_preload),
        "ft-preload-timeout": _bound("--ft-preload-timeout", namespace.ft_preload_timeout, DEFAULT_PRELOAD_TIMEOUT),
        "ft-log-dir": namespace.ft_log_dir,
        "ft-log-max-bytes": _whole(
            "--ft-log-max-bytes", namespace.ft_log_max_bytes, DEFAULT_LOG_MAX_BYTES, range(2**62)
        ),
    }
    return ResolvedOptions(
        config=config,
        sources=sources,
        warnings=warnings,
        restart_policy=ours["restart-policy"],
        scale_up_at_once=ours["ft-scale-up-at-once"],
        node_health_command=ours["ft-node-health-command"],
        node_health_timeout=ours["ft-node-health-timeout"],
        term_timeout=ours["term-timeout"],
        workers_stop_timeout=ours["workers-stop-timeout"],
        workers_stop_timeout_was_set=namespace.ft_workers_stop_timeout is not None,
        log_dir=ours["ft-log-dir"],
        log_max_bytes=ours["ft-log-max-bytes"],
        max_no_progress_cycles=ours["ft-max-no-progress-cycles"],
        no_restart_exit_code=ours["ft-no-restart-exit-code"],
        stopped_exit_code=ours["ft-stopped-exit-code"],
        startup_timeout=ours["ft-startup-timeout"],
        exit_timeout=ours["ft-exit-timeout"],
        observe_only=ours["ft-observe-only"],
        forward_signals=ours["ft-forward-signals"],
        preload=ours["ft-preload"],
        preload_timeout=ours["ft-preload-timeout"],
        options={name: (_plain(value), _source(namespace, name)) for name, value in ours.items()},
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


def _whole(option: str, given: str | None, default: int, allowed: range) -> int:
    if given is None:
        return default
    number = int(given) if given.strip().isdecimal() else -1
    if number not in allowed:
        raise ConfigError(f"{option} {show(given)}: must be a whole number from {allowed.start} to {allowed.stop - 1}")
    return number


def _command(option: str, given: str | None) -> str | None:
    if given is None:
        return None
    if not given.strip():
        raise ConfigError(f"{option} {show(given)}: must be a shell command")
    return given


def _limit(option: str, given: str | None, default: float | None = None) -> float | None:
    if given is None:
        return default
    if given.lower() in ("null", "none"):
        return None
    return _bound(option, given, 0.0, " (null means no limit)")


def _bound(option: str, given: str | None, default: float, hint: str = "") -> float:
    seconds = _seconds(option, given, default)
    if not seconds:
        raise ConfigError(f"{option} {show(given)}: must be greater than 0{hint}")
    return seconds


def _forward_signals(given: str | None) -> tuple[signal.Signals, ...]:
    if given is None:
        return ()
    numbers = []
    for word in given.split(","):
        name = word.strip().upper()
        number = getattr(signal.Signals, name if name.startswith("SIG") else f"SIG{name}", None)
        if number is None:
            allowed = [each.name for each in signal.Signals if each not in _NOT_FORWARDED]
            raise ConfigError(f"--ft-forward-signals: {show(word.strip())} is no signal{nearest(name, allowed)}")
        if number in _NOT_FORWARDED:
            raise ConfigError(f"--ft-forward-signals: {number.name} can't be passed on")
        numbers.append(number)
    return tuple(dict.fromkeys(numbers))


def _plain(value: Any) -> Any:
    """A launcher option's value as JSON holds it."""
    if isinstance(value, tuple):
        return ",".join(each.name if isinstance(each, signal.Signals) else str(each) for each in value)
    return value


def _source(namespace: argparse.Namespace, name: str) -> str:
    dest = name.replace("-", "_")
    value = getattr(namespace, dest if dest.startswith("ft_") else f"ft_{dest}")
    if value is None or value is False:
        return "default"
    # torchrun's options have their defaults in the environment, and so have these
    variable = f"PET_{dest.upper()}"
    if name in ("term-timeout", "workers-stop-timeout", "ft-preload") and os.environ.get(variable) == value:
        return variable
    return "command line"
