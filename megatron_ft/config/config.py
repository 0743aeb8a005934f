"""The configuration: typed, strict at construction and at every assignment, and aware of the source of each value.

One object holds every option, from the command line to the place where it is used; a monitor gets those of its rank.
`ConfigValues` is everything that needs no file. Its subclass with the file methods,
``megatron_ft.FaultToleranceConfig``, is public: this package does no I/O.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from megatron_ft.config.kinds import DURATION, FACTOR, LOG_LEVEL, SIGNAL, TIMEOUT, OptionKind, one_of
from megatron_ft.config.launcher_options import LAUNCHER_OPTIONS, LauncherOptions
from megatron_ft.config.option import Option, option, table_of
from megatron_ft.config.reference import IGNORED, SERVED, describe, is_said
from megatron_ft.config.removed import removed
from megatron_ft.errors import ConfigError, Refused, nearest, show
from megatron_ft.link.base.escalation import GRACE_S, MOST_STARVED_S
from megatron_ft.link.facts.minutes import OUT_OF_SECTION

MAX_SECTIONS = 64
MAX_SECTION_NAME_BYTES = 63
LEARN = ("off", "report", "on")

Self = TypeVar("Self", bound="ConfigValues")
Ignored = list[tuple[str, str]]
"""Ignored options, each with the words by which it was given."""
Given = TypeVar("Given")
Stored = TypeVar("Stored")

if TYPE_CHECKING:

    class Converted(Generic[Given, Stored]):
        """Types of a field for type checkers: accepted and returned."""

        def __get__(self, owner: object, kind: type) -> Stored: ...
        def __set__(self, owner: object, value: Given) -> None: ...
        def __delete__(self, owner: object) -> None: ...


class SectionTimeoutMap(dict[str, "float | None"]):
    """Section name -> timeout in seconds, None for no limit.

    Changes in place are validated like assignments to the configuration: one that is refused raises
    ConfigError and changes nothing.
    """

    def __init__(self, items: Mapping[str, object] | Iterable[tuple[str, object]] = ()) -> None:
        super().__init__()
        self.update(items)

    def update(self, *others: Any, **more: Any) -> None:
        given = {_section_name(name): timeout for name, timeout in dict(*others, **more).items()}
        checked = {name: TIMEOUT.judge(f"rank_section_timeouts[{name!r}] =", each) for name, each in given.items()}
        if len(self.keys() | checked.keys()) > MAX_SECTIONS:
            raise ConfigError(f"rank_section_timeouts: {MAX_SECTIONS} sections at most")
        super().update(checked)

    def __setitem__(self, name: str, timeout: Any) -> None:
        self.update({name: timeout})

    def setdefault(self, name: str, timeout: Any = None) -> float | None:
        if name not in self:
            self[name] = timeout
        return self[name]

    def __ior__(self, other: Any) -> SectionTimeoutMap:  # type: ignore[override,misc]
        self.update(other)
        return self


def _section_name(name: object) -> str:
    # printable text can also be encoded
    if name == OUT_OF_SECTION:
        raise ConfigError(
            f"rank_section_timeouts: {show(name)} can't be a section's name; for the time in no section there is "
            "rank_out_of_section_timeout"
        )
    if isinstance(name, str) and name.isprintable() and name == name.strip():
        if 0 < len(name.encode()) <= MAX_SECTION_NAME_BYTES:
            return str(name)
    raise ConfigError(
        f"rank_section_timeouts: {show(name)} is no section name; it must be a printable text "
        f"of 1 to {MAX_SECTION_NAME_BYTES} bytes without spaces around it"
    )


def _sections(value: object) -> SectionTimeoutMap:
    if not isinstance(value, Mapping):
        raise Refused
    return SectionTimeoutMap(value)


def _read_sections(text: str) -> dict[str, object]:
    """Split sections as written on the command line: ``setup:600,step:180,checkpointing:null``.

    Raises ConfigError for anything else, with the offending part.
    """
    timeouts: dict[str, object] = {}
    for part in text.split(",") if text.strip() else []:
        name, colon, timeout = (piece.strip() for piece in part.rpartition(":"))
        if not colon or not name:
            raise ConfigError(
                f"rank_section_timeouts = {show(text)}: {show(part)} must be NAME:SECONDS, "
                "for example setup:600,step:180,checkpointing:null"
            )
        if name in timeouts:
            raise ConfigError(f"rank_section_timeouts = {show(text)}: section {name!r} is given twice")
        timeouts[name] = TIMEOUT.read(timeout)
    return timeouts


SECTIONS = OptionKind(
    check=_sections,
    read=_read_sections,
    allowed="a mapping from section names to timeouts",
    plain=dict,
    unit="s",
    metavar="NAME:SECONDS,...",
)


@dataclass(kw_only=True, eq=False)
class RankOptions:
    """Options that the ranks and their monitors get, too."""

    initial_rank_heartbeat_timeout: float | None = option(
        3600.0,
        TIMEOUT,
        "Longest time from a rank's init_workload_monitoring() to its first heartbeat, in seconds. Not for ranks that "
        "open sections and send no heartbeat: their timeouts of 'step' and out of section are at least this during "
        "the warm-up.",
    )
    rank_heartbeat_timeout: float | None = option(
        2700.0,
        TIMEOUT,
        "Longest time between two heartbeats of a rank, in seconds. Only for ranks that send heartbeats.",
    )
    rank_section_timeouts: Converted[Mapping[str, float | None], SectionTimeoutMap] = option(
        SectionTimeoutMap,
        SECTIONS,
        "Longest time that each section may stay open, in seconds: setup:600,step:180,checkpointing:null. "
        "Replaces the whole map of the YAML file.",
    )
    rank_out_of_section_timeout: float | None = option(
        None, TIMEOUT, "Longest time that a rank may spend with no section open, in seconds."
    )
    safety_factor: float = option(
        5.0,
        FACTOR,
        "Learned timeout as a multiple of the longest interval that was observed on any rank.",
    )
    learned_floor: float = option(
        60.0,
        DURATION,
        "Least learned timeout that terminates a rank, in seconds; four times that for 'setup'.",
    )
    learn: str = option(
        "report",
        one_of(*LEARN, aliases={"reference": "on"}),
        "What follows from timeouts that are learned from observed intervals. report: a rank that exceeds one is "
        "reported and goes on. on: it is terminated as hung, and timeouts are kept in ft_state.json for the next run, "
        "as a script asks for itself with calc_ft_timeouts. off: no timeout is learned unless the script asks for it.",
        names=("ft-learn", "ft-param-learn"),
    )
    workload_check_interval: float = option(
        5.0,
        DURATION,
        "Longest time between two checks of a rank by its monitor, in seconds. Detection doesn't wait "
        "for it: a monitor also checks its rank at the moment when a timeout can expire.",
    )
    rank_termination_signal: Converted[signal.Signals | int | str, signal.Signals] = option(
        signal.SIGKILL,
        SIGNAL,
        "Signal that terminates a hung rank, by name or number. A rank that is still running "
        f"{GRACE_S:g} seconds later gets SIGKILL. Up to {MOST_STARVED_S:g} seconds in which it waited for a CPU "
        "don't count.",
    )
    log_level: Converted[int | str, int] = option(
        20,
        LOG_LEVEL,
        "Severity from which lines are printed. INFO: all. DEBUG: also state transitions and messages. WARNING, ERROR, "
        "CRITICAL: none about cycles. The loggers of Python below megatron_ft (launcher, monitor, coordinator, rank) "
        "take them, and handlers added there.",
    )


FIELDS = table_of(RankOptions, "ft-", "ft-param-")
OPTIONS: dict[str, Option] = {**FIELDS, **LAUNCHER_OPTIONS}


@dataclass(kw_only=True, eq=False, repr=False)
class ConfigValues(RankOptions, LauncherOptions):
    """The values of all options. Durations are seconds; None means no limit.

    Every assignment is validated; a refused one raises `ConfigError` (a ValueError) and changes nothing.
    The object knows which fields were set (`is_set`); copies, pickles, `to_dict` and YAML carry only those.
    Options of nvidia-resiliency-ext that mean nothing here are kept as plain attributes, with a warning.
    """

    if TYPE_CHECKING:
        sources: dict[str, str] = field(init=False)
        """Place from which each field was set, as "ft.yaml:12"; empty if Python code has set it."""
        warnings: list[str] = field(init=False)
        """Lines for the user about the file and the options that this was read from."""
    else:

        def __init__(self, **values: object) -> None:
            # defaults are class attributes; an instance stores its set fields and its own map of sections
            vars(self).update(sources={}, warnings=[], rank_section_timeouts=SectionTimeoutMap())
            self.warn(self.take(values))

    def __setattr__(self, name: str, value: object) -> None:
        self.warn(self.take({name: value}))

    def take(self, values: Mapping[Any, object], where: Callable[[Any], str] = lambda _name: "") -> Ignored:
        """Set these fields; ``where`` returns the place of a name, as "ft.yaml:12".

        Return the options that are ignored. Raises ConfigError for the first unknown name or refused value.
        """
        ignored = []
        for name, value in values.items():
            place, known = where(name), OPTIONS.get(name)
            if value is None and name in SERVED and name not in FIELDS:
                continue  # nvidia-resiliency-ext's to_yaml_file writes null for what wasn't given
            if known is not None and known.in_yaml:
                self.put(known, known.check(value, place), place)
            elif name in IGNORED:
                vars(self)[name] = value
                if is_said(name, value):
                    ignored.append((name, f"{name} ({place})" if place else name))
            else:
                text = removed(name) or f"unknown key {show(name)}{nearest(str(name), OPTIONS)}"
                raise ConfigError(f"{place}: {text}" if place else text)
        return ignored

    def warn(self, ignored: Ignored) -> None:
        """Warn of ignored options, in one line for all with the same reason."""
        if ignored:
            import warnings  # a monitor meets no such name

            for line in describe(ignored):
                warnings.warn(line, stacklevel=4)

    def put(self, known: Option, stored: object, source: str) -> None:
        """Set a field to a checked value."""
        vars(self)[known.field] = stored
        self.sources[known.field] = source

    def is_set(self, name: str) -> bool:
        """Return True if the user gave this field a value."""
        # a map that was filled in place was set, too
        return name in self.sources or (name == "rank_section_timeouts" and bool(self.rank_section_timeouts))

    def plain(self, name: str) -> Any:
        """Return a field's value for JSON and YAML."""
        return OPTIONS[name].kind.plain(getattr(self, name))

    def to_dict(self) -> dict[str, Any]:
        """Return the set fields for JSON and YAML; `from_dict` gives an equal configuration back."""
        return {name: self.plain(name) for name, each in OPTIONS.items() if each.in_yaml and self.is_set(name)}

    def for_ranks(self) -> dict[str, Any]:
        """Return the set fields that ranks and monitors get, as `to_dict` does."""
        return {name: value for name, value in self.to_dict().items() if name in FIELDS}

    @property
    def is_progress_tracking_enabled(self) -> bool:
        """True, for callers of nvidia-resiliency-ext; only the launcher knows its --ft-max-no-progress-cycles."""
        return True

    @classmethod
    def from_dict(cls: type[Self], values: Mapping[str, Any]) -> Self:
        """Return the configuration with exactly these fields set. Raises ConfigError for an unknown name."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"a configuration must be a mapping, not {show(values)}")
        return cls(**{str(name): value for name, value in values.items()})

    @classmethod
    def from_kwargs(cls: type[Self], ignore_not_recognized: bool = True, **kwargs: Any) -> Self:
        """Return the configuration with these fields set.

        Unknown names are ignored, or raise ConfigError with `ignore_not_recognized=False`. Bad values always raise it.
        """
        return cls(**(recognized(kwargs) if ignore_not_recognized else kwargs))

    def copy(self: Self) -> Self:
        """Return an independent copy with the same fields set."""
        return type(self).from_dict(self.to_dict())

    def __reduce__(self) -> tuple[Any, ...]:  # for pickle, copy.copy and copy.deepcopy
        return type(self).from_dict, (self.to_dict(),)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    def __eq__(self, other: object) -> bool:
        """Compare values, whether set or defaults."""
        if not isinstance(other, ConfigValues):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in OPTIONS)

    __hash__ = None  # type: ignore[assignment]  # mutable


def recognized(values: Mapping[Any, object]) -> dict[Any, object]:
    """Return the values without unknown names."""
    return {name: value for name, value in values.items() if name in OPTIONS or name in IGNORED}
