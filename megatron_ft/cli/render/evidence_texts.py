"""The evidence beside the logs, to be shown in the page: bounded, and only what lies in the log directory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.cli.analysis.timeline import EvidenceFile

__all__ = ["MOST_BYTES", "MOST_BYTES_IN_ALL", "EvidenceText", "read_evidence"]

MOST_BYTES = 64 * 1024
MOST_BYTES_IN_ALL = 2 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class EvidenceText:
    """``note`` says what of the text is missing, and why; "" if it is whole."""

    evidence: EvidenceFile
    text: str
    note: str


def read_evidence(
    log_dirs: str | Sequence[str],
    found: Sequence[EvidenceFile],
    culprits: Collection[tuple[int | None, int | None]] = (),
) -> list[EvidenceText]:
    """The texts: where there are too many, those of the culprits and then of the last failure are what one looks for.

    Args:
        culprits: ranks, each with the cycle, that a record names; their texts come first, then the newest.
    """
    directories = [Path(each) for each in ([log_dirs] if isinstance(log_dirs, str) else log_dirs)]
    left = MOST_BYTES_IN_ALL
    texts = []
    for each in sorted(found, key=lambda each: ((each.rank, each.cycle) not in culprits, -each.at_ns)):
        most = min(MOST_BYTES, left)
        has_it = (directory for directory in directories if (directory / each.file).is_file())
        read, note = _read(next(has_it, directories[0]), each.file, most)
        left -= len(read)
        texts.append(EvidenceText(evidence=each, text=read.decode(errors="replace"), note=note))
    return texts


def _read(log_dir: Path, name: str, most: int) -> tuple[bytes, str]:
    try:
        path = (log_dir / name).resolve()
        # The log may be from another user: it mustn't make us put other files into a page that is handed around.
        if not path.is_relative_to(log_dir.resolve()) or not path.is_file():
            return b"", f"{name} is not a file in the log directory"
        size = path.stat().st_size
        if not most:
            return b"", f"left out: this page holds {MOST_BYTES_IN_ALL >> 20} MiB of evidence already; see {name}"
        with path.open("rb") as file:
            read = file.read(most)
    except (OSError, ValueError) as error:
        return b"", f"{name} can't be read: {error}"
    cut = f"cut after {len(read)} of {size} bytes; see {name}" if size > len(read) else ""
    return read, cut
