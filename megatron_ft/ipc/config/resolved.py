"""What the options of ``ft_launcher`` and the YAML file add up to, and where each value comes from."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_ft.core.config.config import FIELDS, Layer
from megatron_ft.core.config.launcher_options import LAUNCHER_OPTIONS, LauncherOptions
from megatron_ft.core.config.option import Option, check_all
from megatron_ft.core.config.reference import IGNORED, describe
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.records.launcher import Setting
from megatron_ft.ipc.config.options import as_text, source_of
from megatron_ft.ipc.config.yaml_file import FaultToleranceConfig, FileSection, command_line_values, read_section

_NAME_THE_FILE = ("cfg_path", "ignore_missing_cfg")  # the sources of values tell it
_IN_FILES = {name: each for name, each in {**FIELDS, **LAUNCHER_OPTIONS}.items() if each.in_yaml}


@dataclass(frozen=True, kw_only=True)
class ResolvedOptions(LauncherOptions):
    """What the options and the YAML file add up to. Durations are seconds."""

    config: FaultToleranceConfig
    sources: dict[str, tuple[Any, str]]  # field -> (JSON-able value, "default", "command line" or "ft.yaml:12")
    warnings: list[str]
    options: dict[str, tuple[Any, str]]
    """The launcher's own options by name ("term-timeout"): (JSON-able value, source)."""

    def was_set(self, name: str) -> bool:
        """Whether the user gave the option of this name ("term-timeout") a value."""
        return self.options[name][1] != "default"

    def settings(self) -> dict[str, Setting]:
        """`sources` and `options` for an event log."""
        everything = {**self.sources, **self.options}
        return {name: Setting(value=value, source=source) for name, (value, source) in everything.items()}

    def summary(self) -> str:
        """One line: the values that aren't defaults, each with its source."""
        silent = {each.names[0] for each in LAUNCHER_OPTIONS.values() if not each.is_told}
        told = [
            f"{name}={as_text(value)} ({source})"
            for name, (value, source) in [*self.sources.items(), *self.options.items()]
            if source != "default" and name not in silent
        ]
        return f"configuration: {', '.join(told)}; else defaults" if told else "configuration: all defaults"


def read_ft_options(namespace: argparse.Namespace) -> ResolvedOptions:
    """Check the parsed options and the YAML file they name. Raises ConfigError, one line.

    Precedence: command line, then YAML file, then defaults. Unlike `FaultToleranceConfig.from_args`, unknown
    keys in the file are refused, and nothing at all is fine: all defaults.
    """
    warnings: list[str] = []
    given = command_line_values(namespace)
    ours = dict(_launcher_values(namespace))
    section = _read_file(namespace, bool(given), warnings)
    ignored = list(getattr(namespace, "ft_ignored_options", None) or [])
    layers: list[Layer] = []
    sources = {name: source_of(LAUNCHER_OPTIONS[name], getattr(namespace, f"ft_{name}")) for name in ours}
    if section is not None:
        ignored += [(name, f"{name} ({section.where(name)})") for name in section.values if name in IGNORED]
        known = {name: value for name, value in section.values.items() if name not in IGNORED}
        values = check_all(_IN_FILES, known, section.where)
        layers.append(({name: value for name, value in values.items() if name in FIELDS}, section.where))
        for name in values.keys() & LAUNCHER_OPTIONS.keys() - ours.keys():
            ours[name], sources[name] = values[name], section.where(name)
    layers.append((given, lambda name: source_of(FIELDS[name], getattr(namespace, f"ft_{name}"))))
    config, config_sources = FaultToleranceConfig.resolve(*layers)
    warnings += describe(ignored)
    if config.safety_factor < 1:
        warnings.append(
            f"safety_factor={config.safety_factor:g} is below 1: "
            "learned timeouts will be shorter than the longest interval that was seen"
        )
    effective = {name: ours.get(name, each.default) for name, each in LAUNCHER_OPTIONS.items()}
    return ResolvedOptions(
        config=config,
        sources=config_sources,
        warnings=warnings,
        options={
            each.names[0]: (each.kind.plain(effective[name]), sources.get(name, "default"))
            for name, each in LAUNCHER_OPTIONS.items()
            if name not in _NAME_THE_FILE
        },
        **effective,
    )


def _launcher_values(namespace: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """The launcher's own options that the command line, or an environment variable, sets."""
    for name, each in LAUNCHER_OPTIONS.items():
        given = getattr(namespace, each.dest, None)
        if given is not None:
            yield name, _parse(each, given)


def _parse(option: Option, given: Any) -> Any:
    label = f"--{option.names[0]}"
    return option.kind.judge(label, option.kind.read(given) if isinstance(given, str) else given)


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
