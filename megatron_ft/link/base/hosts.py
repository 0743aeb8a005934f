"""Names of hosts: their order, and Slurm's short form of lists of them; the file that marks a segment. Pure."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping

_WORD = re.compile(r"(?:\[[^\]]*\]|[^,])+")
_PARTS = re.compile(r"([^0-9]*)([0-9]*)")
_RANGES = re.compile(r"\[([^\]]*)\]")


@functools.lru_cache(maxsize=1 << 15)
def natural(name: str) -> tuple[tuple[str, int], ...]:
    """Return a sort key by which node2 comes before node10."""
    return tuple((text, int(number or 0)) for text, number in _PARTS.findall(name))


def expand_hosts(text: str, most: int) -> tuple[str, ...]:
    """Return the first ``most`` hosts of Slurm's short form: ``node[01-03,7],gpu1``. Malformed parts are left out."""
    names = itertools.chain.from_iterable(_expand(word.strip()) for word in _WORD.findall(text))
    return tuple(itertools.islice(filter(None, names), most))


def _expand(word: str) -> Iterator[str]:
    ranges = _RANGES.search(word)
    if ranges is None:
        if "[" not in word and "]" not in word:
            yield word
        return
    for number in _numbers(ranges[1]):
        for rest in _expand(word[ranges.end() :]) if ranges.end() < len(word) else ("",):
            yield word[: ranges.start()] + number + rest


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, dash, last = part.strip().partition("-")
        if first.isdecimal() and (last.isdecimal() or not dash):
            for number in range(int(first), int(last or first) + 1):
                yield f"{number:0{len(first)}}"


def segment_file(environ: Mapping[str, str]) -> str:
    """Return the name of the file that keeps this array task of Slurm, or this job, out of rounds; empty elsewhere.

    nvidia-resiliency-ext 0.7 reads the same name.
    """
    job = environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID") or ""
    return job and f"segment_health_check.{job}.{environ.get('SLURM_ARRAY_TASK_ID') or job}"
