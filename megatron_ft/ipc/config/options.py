"""The tables of options as options of argparse; what they add up to is `ipc.config.resolved`' work."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from megatron_ft.core.config.config import FIELDS
from megatron_ft.core.config.launcher_options import LAUNCHER_OPTIONS
from megatron_ft.core.config.option import Option, spellings
from megatron_ft.core.config.reference import IGNORED
from megatron_ft.core.errors import nearest


def add_ft_options(parser: argparse.ArgumentParser) -> None:
    """Add the group "fault tolerance" to torchrun's parser.

    Every option has several spellings, of which ``--help`` shows one. Values stay texts: `read_ft_options`
    judges them, so that a bad one gives one line instead of a usage dump.
    """
    group = parser.add_argument_group(
        "fault tolerance", "Durations are seconds, null means no limit. Options win over the YAML file."
    )
    for each in (*FIELDS.values(), *LAUNCHER_OPTIONS.values()):
        _add(group, each)
    for name in IGNORED:
        words = [word for prefix in ("ft-param-", "ft-") for word in spellings(prefix + name)]
        group.add_argument(*words, action=_Ignore, const=name, help=argparse.SUPPRESS)
    _refuse_abbreviations(parser, group)


def source_of(option: Option, given: object) -> str:
    """Where the value in the parsed arguments comes from."""
    if option.is_flag:
        given = "1" if given else None
    return next((name for name in option.variables if os.environ.get(name) == given), "command line")


def default_text(option: Option) -> str:
    """Its default for people."""
    value = option.kind.plain(option.default)
    if value is None:
        return "null" if option.kind.unit else "none"
    return as_text(value) or "none"


def with_hint(message: str, parser: argparse.ArgumentParser) -> str:
    """What argparse has to complain about, with the option that was probably meant."""
    prefix, see = "unrecognized arguments: ", f" (see {parser.prog} --help)"
    if not message.startswith(prefix):
        return message if "training_script" not in message else message + see
    name = message.removeprefix(prefix).split()[0].partition("=")[0]
    # of several spellings that are as near, the last one is proposed: the first one that --help shows
    actions = sorted(parser._actions, key=lambda action: action.help != argparse.SUPPRESS)
    known = [word for action in actions for word in reversed(action.option_strings) if word.startswith("--")]
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
    if isinstance(value, tuple):
        return ",".join(map(str, value))
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


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    given = next((os.environ[name] for name in option.variables if name in os.environ), None)
    told = "" if option.is_flag or "Default: " in option.help else f" Default: {default_text(option)}."
    shown, *others = option.spellings
    if option.is_flag:
        known: dict[str, Any] = {"action": "store_const", "const": True, "default": _is_on(given)}
    else:
        known = {"default": given}
    metavar: dict[str, Any] = {} if option.is_flag else {"metavar": option.kind.metavar}
    group.add_argument(shown, dest=option.dest, help=option.help + told, **metavar, **known)
    group.add_argument(*others, dest=option.dest, help=argparse.SUPPRESS, **known)


def _is_on(given: str | None) -> bool | None:
    """As torchrun reads its own PET_ variables of options without a value."""
    return True if given not in (None, "", "0") else None


class _Ignore(argparse.Action):
    """Remembers the option's name, and how it was written, not its value."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: str, **options: Any) -> None:
        super().__init__(option_strings, "ft_ignored_options", default=None, **{**options, "type": str})
        self.name = const

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        ignored = getattr(namespace, self.dest) or []
        setattr(namespace, self.dest, [*ignored, (self.name, option_string)])
