"""Options of ``ft_launcher`` for argparse, merged with the YAML file: each value and its source."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from megatron_ft.config.config import FIELDS, OPTIONS
from megatron_ft.config.files.yaml_file import FaultToleranceConfig, FileSection, read_section, take_arguments
from megatron_ft.config.option import Option, spellings
from megatron_ft.config.reference import IGNORED, describe, is_said
from megatron_ft.config.removed import REMOVED_COMMANDS, removed
from megatron_ft.errors import ConfigError, near
from megatron_ft.link.facts.launcher import Config


def add_ft_options(parser: argparse.ArgumentParser) -> None:
    """Add the group "fault tolerance" to torchrun's parser.

    Values stay texts: `read_ft_options` checks them, so that a bad one gives one line instead of a usage dump.
    """
    group = parser.add_argument_group(
        "fault tolerance", "Durations are seconds, null means no limit. Options win over the YAML file."
    )
    for each in OPTIONS.values():
        _add(group, each)
    for name in IGNORED:
        words = [word for prefix in ("ft-param-", "ft-") for word in spellings(prefix + name)]
        group.add_argument(*words, dest=f"ft_{name}", help=argparse.SUPPRESS)
    _refuse_abbreviations(parser, group)


def default_text(option: Option) -> str:
    """Return the default for people."""
    value = option.kind.plain(option.default)
    if value is None:
        return "null" if option.kind.unit else "none"
    return as_text(value) or "none"


def with_hint(message: str, parser: argparse.ArgumentParser) -> str:
    """Return argparse's complaint, with the option that was probably meant."""
    prefix, see = "unrecognized arguments: ", f" (see {parser.prog} --help)"
    if not message.startswith(prefix):
        return message if "training_script" not in message else message + see
    name = message.removeprefix(prefix).split()[0].partition("=")[0]
    if text := removed(name):
        return text
    gone = f"{parser.prog.split()[-1]} {name}"
    if gone in REMOVED_COMMANDS:
        return f"there is no {gone} any more: {REMOVED_COMMANDS[gone]}"
    known = {word: each for word, each in parser._option_string_actions.items() if word.startswith("--")}
    meant = near(name, known)
    if meant is None:
        return message + see
    shown = next(word for word in known[meant].option_strings if word.startswith("--"))
    return f"{message} (did you mean '{shown}'?)"


def as_text(value: object) -> str:
    """Format a value as on the command line."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return ",".join(f"{name}:{as_text(timeout)}" for name, timeout in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _refuse_abbreviations(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> None:
    """Refuse abbreviations of the options of ``group``.

    argparse takes any prefix that only one option has. Beside ours, abbreviations of torchrun's options (``--te 3``)
    would become ambiguous, or ours.
    """
    find = parser._get_option_tuples
    ours = {id(action) for action in group._group_actions}

    def find_others(text: str) -> list[Any]:
        return [found for found in find(text) if id(found[0]) not in ours]

    parser._get_option_tuples = find_others  # type: ignore[assignment, method-assign]


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    """Add an option with all its spellings, of which help and error messages show the first."""
    given = next((os.environ[name] for name in option.variables if name in os.environ), None)
    if option.is_flag:
        # a flag's variable is read as torchrun reads its PET_ variables of options without a value
        is_on = True if given not in (None, "", "0") else None
        known: dict[str, Any] = {"action": "store_const", "const": True, "default": is_on}
    else:
        known = {"default": given, "metavar": option.kind.metavar}
    told = "" if option.is_flag or "Default: " in option.help else f" Default: {default_text(option)}."
    action = group.add_argument(*option.spellings, dest=option.dest, help=option.help + told, **known)
    action.option_strings = option.spellings[:1]


def as_record(config: FaultToleranceConfig, command: Sequence[str] = ()) -> Config:
    """Return the record of every value and its source; ``command``: that of a rank."""
    names = [name for name, each in OPTIONS.items() if each.in_yaml or each.is_printed]
    return Config(
        values={name: config.plain(name) for name in names},
        sources={name: config.sources.get(name, "default") for name in names},
        command=tuple(command),
    )


def rows(config: FaultToleranceConfig) -> list[tuple[str, str, str]]:
    """Return name, value and source of every option, with one row for each section's timeout."""
    table, told = [], as_record(config)
    for name, value in told.values.items():
        if isinstance(value, dict) and value:
            table += [(f"{name}[{section}]", as_text(each), told.sources[name]) for section, each in value.items()]
        else:
            is_nothing = value == {} or (value in (None, "") and not OPTIONS[name].kind.unit)
            table.append((name, "(none)" if is_nothing else as_text(value), told.sources[name]))
    return table


def summary(config: FaultToleranceConfig) -> str:
    """Return one line: the values that aren't defaults, each with its source."""
    told = as_record(config)
    texts = [
        f"{name}={as_text(value)} ({told.sources[name]})"
        for name, value in told.values.items()
        if told.sources[name] != "default" and OPTIONS[name].is_printed
    ]
    return f"configuration: {', '.join(texts)}; else defaults" if texts else "configuration: all defaults"


def read_ft_options(namespace: argparse.Namespace) -> FaultToleranceConfig:
    """Check the parsed options and the YAML file they name. Raises ConfigError, one line.

    Precedence: command line, YAML file, defaults. Unlike `FaultToleranceConfig.from_args`, unknown keys in the file are
    refused, an empty configuration is valid (all defaults), and warnings are kept as lines.
    """
    config = FaultToleranceConfig()
    section = _read_file(namespace, config.warnings)
    theirs = [] if section is None else config.take(section.values, section.where)
    take_arguments(config, namespace)
    words = [
        (name, f"--ft-{name.replace('_', '-')}") for name in IGNORED if is_said(name, getattr(namespace, f"ft_{name}"))
    ]
    config.warnings.extend(describe([*words, *theirs]))
    return config


def _read_file(namespace: argparse.Namespace, warnings: list[str]) -> FileSection | None:
    path, may_be_missing = namespace.ft_cfg_path, namespace.ft_ignore_missing_cfg
    if path is None:
        return None
    if may_be_missing and not os.path.lexists(path):
        warnings.append(f"{path} does not exist: continuing without it")
        return None
    section = read_section(path)
    if section is None and all(getattr(namespace, each.dest) is None for each in FIELDS.values()):
        lacks = f"{path}: there is no 'fault_tolerance' section"
        if not may_be_missing:
            raise ConfigError(f"{lacks}, and no option of the command line sets anything")
        warnings.append(f"{lacks}: continuing with the defaults")
    return section
