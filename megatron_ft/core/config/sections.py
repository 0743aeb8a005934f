"""The map from a section's name to its timeout, and its spelling on the command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_ft.core.config.kinds import TIMEOUT, Kind
from megatron_ft.core.errors import ConfigError, Refused, show
from megatron_ft.core.timeouts.timeouts import OUT_OF_SECTION

MAX_SECTIONS = 64
MAX_SECTION_NAME_BYTES = 63


class SectionTimeoutMap(dict[str, "float | None"]):
    """Section name -> timeout in seconds, None for no limit.

    Changes in place are validated like assignments to the configuration: one that is refused raises
    ConfigError and changes nothing.
    """

    def __init__(self, items: Mapping[str, object] | Iterable[tuple[str, object]] = ()) -> None:
        super().__init__()
        self.update(items)

    def update(self, *others: Any, **more: Any) -> None:
        checked = {_section_name(name): _section_timeout(name, t) for name, t in dict(*others, **more).items()}
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
    # what is printable can also be encoded
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


def _section_timeout(name: str, timeout: object) -> float | None:
    seconds: float | None = TIMEOUT.judge(f"rank_section_timeouts[{name!r}] =", timeout)
    return seconds


def _sections(value: object) -> SectionTimeoutMap:
    if not isinstance(value, Mapping):
        raise Refused
    return SectionTimeoutMap(value)


def parse_section_timeouts(text: str) -> dict[str, float | None]:
    """Sections as the command line writes them: ``setup:600,step:180,checkpointing:null``.

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
    return SectionTimeoutMap(timeouts)


SECTIONS = Kind(
    check=_sections,
    read=parse_section_timeouts,
    allowed="a mapping from section names to timeouts",
    plain=dict,
    unit="s",
    metavar="NAME:SECONDS,...",
)
