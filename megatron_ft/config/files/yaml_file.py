"""The public configuration class, and its YAML files.

A file holds the configuration under a key ``fault_tolerance``, at the top or nested in any other section, so it can
live inside the configuration of the training itself. Only that section is built into Python values: the rest of the
file, custom tags included, is left alone. Every mistake is one line, with file and line number.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_ft.config.config import OPTIONS, ConfigValues, recognized
from megatron_ft.config.reference import IGNORED
from megatron_ft.errors import ConfigError
from megatron_ft.link.files.atomic_write import write_whole

if TYPE_CHECKING:
    import yaml  # at run time only where a file is read or written: a monitor gets its values as JSON

SECTION = "fault_tolerance"
_MAX_BYTES = 16 * 2**20  # far above any configuration; a path like /dev/zero must not fill the memory

Self = TypeVar("Self", bound="FaultToleranceConfig")


class FaultToleranceConfig(ConfigValues):
    """The configuration of fault tolerance. Durations are seconds; None means no limit.

    Every assignment is validated; a refused one raises `ConfigError` (a ValueError) and changes nothing.
    The object knows which fields were set (`is_set`); copies, pickles, `to_dict` and YAML carry only those.
    """

    @classmethod
    def from_yaml_file(cls: type[Self], cfg_path: str | os.PathLike[str], ignore_not_recognized: bool = True) -> Self:
        """Return the configuration of the file's ``fault_tolerance`` section.

        Raises ConfigError for a file without one, for bad values, and, with `ignore_not_recognized=False`, for unknown
        keys. Keys of nvidia-resiliency-ext only are ignored with a warning.
        """
        section = read_section(cfg_path)
        if section is None:
            raise ConfigError(f"{_shown(cfg_path)}: there is no {SECTION!r} section")
        config = cls()
        values = recognized(section.values) if ignore_not_recognized else section.values
        config.warn(config.take(values, section.where))
        return config

    def to_yaml_file(self, cfg_path: str | os.PathLike[str]) -> None:
        """Write the fields that were set, under ``fault_tolerance``. Raises OSError."""
        import yaml

        text = yaml.safe_dump({SECTION: self.to_dict()}, sort_keys=False, allow_unicode=True)
        write_whole(cfg_path, text)

    @classmethod
    def from_args(cls: type[Self], args: object) -> Self:
        """Return the configuration of a command line: the YAML file ``args.ft_cfg_path``, then ``args.ft_<field>``.

        Attributes that are missing or None set nothing; a map of sections replaces the file's map as a whole. A file
        without the section is valid if an attribute sets something. Raises ConfigError if nothing is set.
        """
        config, path = cls(), getattr(args, "ft_cfg_path", None)
        section = None if path is None else read_section(path)
        if section is not None:
            config.warn(config.take(recognized(section.values), section.where))
        if not take_arguments(config, args) and section is None:
            raise ConfigError("no fault tolerance configuration: neither a YAML section nor an option gives one")
        return config


def take_arguments(config: FaultToleranceConfig, args: object) -> bool:
    """Set the fields for which ``args`` has an attribute ``ft_<field>``. Return True if any is of the configuration.

    Raises ConfigError, one line that begins with the option.
    """
    for name in IGNORED:
        if (value := getattr(args, f"ft_{name}", None)) is not None:
            vars(config)[name] = value
    given = [(each, value) for each in OPTIONS.values() if (value := getattr(args, each.dest, None)) is not None]
    for option, value in given:
        text = "1" if option.is_flag else value  # it may come from torchrun's kind of variables
        source = next((name for name in option.variables if os.environ.get(name) == text), "command line")
        config.put(option, option.parse(value), source)
    return any(option.in_yaml for option, _ in given)


@dataclass(frozen=True)
class FileSection:
    """The unchecked ``fault_tolerance`` section of a file."""

    path: str
    values: dict[Any, object]
    lines: dict[Any, int]

    def where(self, name: object) -> str:
        """Return the place of a key: "ft.yaml:12"."""
        return f"{self.path}:{self.lines[name]}"


def read_section(path: str | os.PathLike[str]) -> FileSection | None:
    """Return the ``fault_tolerance`` section of a YAML file, None without one.

    Raises ConfigError, one line, if the file can't be read, isn't YAML, has two different sections, or if a key inside
    the section is there twice.
    """
    import yaml

    shown = _shown(path)
    data = _read_bytes(path)
    try:
        root = yaml.compose(data, Loader=yaml.SafeLoader)
        found = [] if root is None else list(_find_sections(root, set()))
        return _build_section(shown, found)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = shown if mark is None else f"{shown}:{mark.line + 1}"
        raise ConfigError(f"{place}: not YAML that can be read here: {error.problem}") from None
    except yaml.YAMLError:  # raised by the reader: bytes that are no text
        raise ConfigError(f"{shown}: not a text file") from None
    except RecursionError:
        raise ConfigError(f"{shown}: nested too deeply") from None


def _shown(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    return text if text.isprintable() else repr(text)


def _read_bytes(path: str | os.PathLike[str]) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"can't read {_shown(path)}: {error.strerror}") from None
    except ValueError as error:  # a path with a null byte
        raise ConfigError(f"can't read {_shown(path)}: {error}") from None
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{_shown(path)}: larger than {_MAX_BYTES} bytes, this can't be a configuration")
    return data


def _children(node: yaml.Node, seen: set[int]) -> Iterator[tuple[yaml.Node | None, yaml.Node]]:
    """Yield key, if it has one, and value of each child of a node; nothing for one in `seen`: aliases may loop."""
    if id(node) not in seen and not isinstance(node.value, str):
        seen.add(id(node))
        yield from (child if isinstance(child, tuple) else (None, child) for child in node.value)


def _find_sections(node: yaml.Node, seen: set[int]) -> Iterator[tuple[yaml.Node, yaml.Node]]:
    """Yield key and value of every ``fault_tolerance`` in the document."""
    for key, value in _children(node, seen):
        if key is not None and key.value == SECTION:
            yield key, value
        else:
            yield from _find_sections(value, seen)


def _build_section(path: str, found: list[tuple[yaml.Node, yaml.Node]]) -> FileSection | None:
    if not found:
        return None
    import yaml

    built = []
    for key, node in found:
        line = key.start_mark.line + 1
        # An unrelated switch may have the same name; it only matters if nothing else is there.
        if node.tag == "tag:yaml.org,2002:null":
            built.append((line, FileSection(path, {}, {})))
        elif isinstance(node, yaml.MappingNode):
            built.append((line, _build_mapping(path, node)))
    if not built:
        line = found[0][0].start_mark.line + 1
        raise ConfigError(f"{path}:{line}: {SECTION!r} must be a mapping from names to values")
    first_line, first = built[0]
    for line, other in built[1:]:
        if other.values != first.values:
            raise ConfigError(f"{path}: lines {first_line} and {line} have different {SECTION!r} sections")
    return first


def _build_mapping(path: str, node: yaml.Node) -> FileSection:
    import yaml

    _refuse_duplicates(path, node, set())
    loader = yaml.SafeLoader("")
    try:
        values = loader.construct_object(node, deep=True)
        # Building it has put the merged keys ("<<") in front of its own, which win.
        lines = {loader.construct_object(key, deep=True): key.start_mark.line + 1 for key, _ in node.value}
    except ValueError as error:  # raised for a scalar that looks like a number or date but is none
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: {error}") from None
    return FileSection(path, values, lines)


def _refuse_duplicates(path: str, node: yaml.Node, seen: set[int]) -> None:
    """Refuse duplicate keys, which YAML forbids; PyYAML would silently take the last."""
    lines: dict[tuple[str, str], int] = {}
    for key, value in _children(node, seen):
        if key is not None and isinstance(key.value, str):
            line = key.start_mark.line + 1
            if before := lines.get((key.tag, key.value)):
                raise ConfigError(f"{path}:{line}: {key.value!r} is there twice, first in line {before}")
            lines[key.tag, key.value] = line
        _refuse_duplicates(path, value, seen)
