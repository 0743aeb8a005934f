"""Description of an option, and the tables of options made from dataclasses."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from megatron_ft.config.kinds import FLAG, OptionKind
from megatron_ft.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Option:
    """Description of an option: each is defined in one place, as a field of a dataclass."""

    field: str
    """Attribute of the configuration and, if `in_yaml`, key of the YAML file."""
    kind: OptionKind
    default: Any
    help: str
    names: tuple[str, ...]
    """Names on the command line, without leading dashes; the first is shown, others may be the reference's."""
    in_yaml: bool
    is_printed: bool
    """True if the launcher prints its value at the start, unless it is the default."""

    @property
    def dest(self) -> str:
        """Attribute of parsed arguments."""
        return f"ft_{self.field}"

    @property
    def is_flag(self) -> bool:
        """True if it takes no value on the command line."""
        return self.kind is FLAG

    @property
    def spellings(self) -> list[str]:
        """Spellings on the command line; the first one is shown."""
        return list(dict.fromkeys(each for name in self.names for each in spellings(name)))

    @property
    def variables(self) -> list[str]:
        """Environment variables of the option, in the form of torchrun's own options."""
        return [f"PET_{name.upper().replace('-', '_')}" for name in self.names]

    def check(self, value: object, place: str = "") -> Any:
        """Return `value` as stored. Raises ConfigError, one line that begins with the place of the value, if given."""
        try:
            return self.kind.judge(f"{self.field} =", value)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}" if place else str(error)) from None

    def parse(self, given: object) -> Any:
        """Return a text of the command line as stored. Raises ConfigError, one line."""
        return self.kind.parse(f"--{self.names[0]}", given)


def option(
    default: Any,
    kind: OptionKind,
    help: str,  # noqa: A002
    *,
    names: tuple[str, ...] = (),
    in_yaml: bool = True,
    is_printed: bool = True,
) -> Any:
    """Declare an option as a field of a dataclass; a callable `default` makes the value. Names: see `table_of`."""
    known = {"kind": kind, "help": help, "names": names, "in_yaml": in_yaml, "is_printed": is_printed}
    if callable(default):
        return field(default_factory=default, metadata=known)
    return field(default=default, metadata=known)


def table_of(options: type, *prefixes: str) -> dict[str, Option]:
    """Return the options that are fields of this dataclass, by field.

    An option without names of its own has the field's, after each of the prefixes.
    """
    table = {}
    for each in fields(options):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        known = dict(each.metadata)
        known["names"] = known["names"] or tuple(prefix + each.name.replace("_", "-") for prefix in prefixes)
        table[each.name] = Option(field=each.name, default=default, **known)
    return table


def spellings(name: str) -> list[str]:
    """Return the option as written, and with underscores: after "--ft-" or "--ft-param-" only, or everywhere."""
    prefix = next((start for start in ("ft-param-", "ft-") if name.startswith(start)), "")
    rest = name.removeprefix(prefix)
    rests = (rest, rest.replace("_", "-"), rest.replace("-", "_"))
    return list(dict.fromkeys(f"--{start}{end}" for start in (prefix, prefix.replace("-", "_")) for end in rests))
