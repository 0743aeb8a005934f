"""The configuration: typed, strict at construction and at every assignment, and aware of what was set.

`ConfigValues` is everything that needs no file. What users see is its subclass with the file methods,
``megatron_ft.FaultToleranceConfig`` (in `megatron_ft.ipc.config.yaml_file`): this floor does no I/O.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_ft.core.config.fields import FIELDS, SectionTimeoutMap, check_value, nearest, plain, show
from megatron_ft.core.config.reference_names import REFERENCE_FIELDS
from megatron_ft.core.errors import ConfigError

Self = TypeVar("Self", bound="ConfigValues")


@dataclass(kw_only=True, eq=False)
class ConfigValues:
    """The values of the fault-tolerance configuration. Durations are seconds; None means no limit.

    Every assignment is validated; a refused one raises `ConfigError` (a ValueError) and changes nothing.
    The object knows which fields were set (`is_set`); copies, pickles, `to_dict` and YAML carry only those.
    `del cfg.field` puts a field's default back. `dataclasses.replace` sets every field: prefer `copy()`.
    Fields that only nvidia-resiliency-ext knows are ignored with a warning, here as in files and on command lines.
    """

    initial_rank_heartbeat_timeout: float | None = 3600.0
    rank_heartbeat_timeout: float | None = 2700.0
    rank_section_timeouts: SectionTimeoutMap = field(default_factory=SectionTimeoutMap)
    rank_out_of_section_timeout: float | None = None
    safety_factor: float = 5.0
    calculated_timeout_floor: float = 5.0
    workload_check_interval: float = 5.0
    rank_termination_signal: signal.Signals = signal.SIGKILL
    log_level: int = 20

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            initial_rank_heartbeat_timeout: float | None = ...,
            rank_heartbeat_timeout: float | None = ...,
            rank_section_timeouts: Mapping[str, float | None] = ...,
            rank_out_of_section_timeout: float | None = ...,
            safety_factor: float = ...,
            calculated_timeout_floor: float = ...,
            workload_check_interval: float = ...,
            rank_termination_signal: signal.Signals | int | str = ...,
            log_level: int | str = ...,
        ) -> None: ...

    else:

        def __init__(self, **values: object) -> None:
            # Defaults are class attributes; an instance stores its set fields and its own map of sections.
            self.__dict__["_assigned"] = set()
            self.__dict__["rank_section_timeouts"] = SectionTimeoutMap()
            warn_of_ignored([name for name in values if name in REFERENCE_FIELDS])
            for name, value in values.items():
                if name not in REFERENCE_FIELDS:
                    setattr(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        if name in REFERENCE_FIELDS:
            warn_of_ignored([name])
            return
        if name not in FIELDS:
            raise ConfigError(f"unknown field {show(name)} of {type(self).__name__}{nearest(name, FIELDS)}")
        self.__dict__[name] = check_value(name, value)
        self.__dict__["_assigned"].add(name)

    def __delattr__(self, name: str) -> None:
        if name not in FIELDS:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}")
        self.__dict__["_assigned"].discard(name)
        self.__dict__.pop(name, None)
        if name == "rank_section_timeouts":
            self.__dict__[name] = SectionTimeoutMap()

    def is_set(self, name: str) -> bool:
        """Whether somebody gave this field a value (rather than leaving it at its default)."""
        assert name in FIELDS, name
        # A map that was filled in place was set too.
        return name in self.__dict__["_assigned"] or (name == "rank_section_timeouts" and bool(self.__dict__[name]))

    @property
    def set_fields(self) -> frozenset[str]:
        """Names of the fields that were set."""
        return frozenset(name for name in FIELDS if self.is_set(name))

    def to_dict(self) -> dict[str, Any]:
        """The set fields as JSON and YAML can hold them; `from_dict` gives an equal configuration back."""
        return {name: plain(name, getattr(self, name)) for name in FIELDS if self.is_set(name)}

    @classmethod
    def from_dict(cls: type[Self], values: Mapping[str, Any]) -> Self:
        """The configuration with exactly these fields set. Raises ConfigError for an unknown name."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"a configuration must be a mapping, not {show(values)}")
        return cls(**{str(name): value for name, value in values.items()})

    @classmethod
    def from_kwargs(cls: type[Self], ignore_not_recognized: bool = True, **kwargs: Any) -> Self:
        """The configuration with these fields set.

        Unknown names are ignored, or raise ConfigError with `ignore_not_recognized=False`. Bad values always
        raise it.
        """
        known = {name: value for name, value in kwargs.items() if name in FIELDS or name in REFERENCE_FIELDS}
        return cls(**(known if ignore_not_recognized else kwargs))

    @classmethod
    def resolve(cls: type[Self], *layers: Layer) -> tuple[Self, dict[str, tuple[Any, str]]]:
        """The configuration that layers of values make together, and where each value comes from.

        A later layer wins, field by field; a map of sections replaces the earlier map whole. The second
        result maps every field to its (JSON-able) value and its source: "default" where no layer says
        anything.
        """
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for layer, source in layers:
            values.update(layer)
            sources.update({name: source(name) for name in layer})
        config = cls(**values)
        effective = {name: plain(name, getattr(config, name)) for name in FIELDS}
        return config, {name: (value, sources.get(name, "default")) for name, value in effective.items()}

    def copy(self: Self) -> Self:
        """An independent copy that has the same fields set."""
        return type(self).from_dict(self.to_dict())

    def __reduce__(self) -> tuple[Any, ...]:  # serves pickle, copy.copy and copy.deepcopy
        return type(self).from_dict, (self.to_dict(),)

    def __eq__(self, other: object) -> bool:
        """Equal values; which of them were set doesn't matter."""
        if not isinstance(other, ConfigValues):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in FIELDS)

    __hash__ = None  # type: ignore[assignment]  # mutable


def describe_ignored(names: Iterable[str]) -> str:
    """The warning about what a user has set and nothing here reads."""
    return f"ignored, because only nvidia-resiliency-ext knows it: {', '.join(names)}"


def warn_of_ignored(names: Sequence[str]) -> None:
    """Give that warning, if there is anything to warn of."""
    if names:
        import warnings  # no monitor needs it

        warnings.warn(describe_ignored(names), stacklevel=3)


Layer = tuple[Mapping[str, Any], Callable[[str], str]]
"""Values by field, and a function from a field's name to the place its value comes from ("ft.yaml:12")."""


def strict_from_mapping(
    values: Mapping[Any, object],
    where: Callable[[Any], str],
    convert: Callable[[str, Any], Any] = check_value,
) -> tuple[dict[str, Any], list[str]]:
    """The values as the fields store them, and the names that only nvidia-resiliency-ext knows.

    `where(name)` is the place of a name, for messages. Raises ConfigError, one line, for the first unknown
    name or refused value. `convert` is `check_value` for typed values, `parse_text` for texts of the command
    line.
    """
    checked: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in values.items():
        if name in REFERENCE_FIELDS:
            ignored.append(name)
        elif name not in FIELDS:
            raise ConfigError(f"{where(name)}: unknown key {show(name)}{nearest(str(name), FIELDS)}")
        else:
            try:
                checked[name] = convert(name, value)
            except ConfigError as error:
                raise ConfigError(f"{where(name)}: {error}") from None
    return checked, ignored
