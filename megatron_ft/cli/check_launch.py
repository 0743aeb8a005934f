"""`megatron-ft check-launch`: what each flag of a launch line, also inside of a script, means for ft_launcher.

Launch lines are those of torchrun, nvidia-resiliency-ext and ft_launcher itself.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megatron_ft.core.config.config import FIELDS
from megatron_ft.core.config.launcher_options import LAUNCHER_OPTIONS
from megatron_ft.core.config.option import Option, spellings
from megatron_ft.core.config.reference import IGNORED
from megatron_ft.core.config.torchrun import TORCHRUN_OPTIONS, TorchrunOption
from megatron_ft.core.errors import ConfigError, nearest

_FIRST_BYTES = 4096
_MAX_BYTES = 2**20
_PROGRAMS = ("torchrun", "ft_launcher")
_MODULES = (
    *("torch.distributed.run", "torch.distributed.launch", "megatron_ft.launcher"),
    "nvidia_resiliency_ext.fault_tolerance.launcher",
)
_ASSIGNED = re.compile(r"^\s*(?:export\s+|local\s+)?(\w+)=(\([^)]*\)|\"[^\"]*\"|'[^']*'|[^\s;&|]*)", re.MULTILINE)
_USED = re.compile(r"\$\{(\w+)(?:\[[@*]\])?\}|\$(\w+)")
_ENDS = ("|", "||", "&&", "&", ";", ">", ">>", "2>", "2>&1", "&>", "<")
_ONLY_NAMED_BY = ("which", "command", "echo", "--launcher")
_DEEPEST = 4


class Meaning(Enum):
    """What becomes of a flag."""

    WORKS = "works"
    DIFFERS = "means something else"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True)
class Flag:
    """One flag: its words as they stand there, and what is to be said of it."""

    words: tuple[str, ...]
    meaning: Meaning
    note: str = ""


@dataclass(frozen=True)
class LaunchLine:
    """One command: the words up to the launcher's name, its flags, and the script with its arguments."""

    launcher: str
    before: tuple[str, ...]
    flags: tuple[Flag, ...]
    script: tuple[str, ...]

    @property
    def to_use(self) -> str:
        """The command for ft_launcher: without what is ignored or refused."""
        kept = [word for flag in self.flags if flag.meaning in (Meaning.WORKS, Meaning.DIFFERS) for word in flag.words]
        return " ".join(map(_quoted, (*self.before, "ft_launcher", *kept, *self.script)))


def add_commands(commands: Any) -> None:
    """Add it, and `launch`, to the subparsers of `megatron-ft`."""
    parser = commands.add_parser(
        "check-launch",
        help="what the flags of a line for torchrun or nvidia-resiliency-ext mean for ft_launcher",
        description="Read the launch lines of a script (sbatch, NeMo-Run, Bridge), or a command, and say flag by flag: "
        "works, means something else, ignored, refused. Exit code 1: one is refused; 2: there is no such line.",
    )
    parser.add_argument("words", metavar="FILE|COMMAND", nargs=argparse.REMAINDER, help="a script, or the command")
    parser.set_defaults(run=_run)
    parser = commands.add_parser(
        "launch", help="the same as ft_launcher", description="Runs ft_launcher.", add_help=False, prefix_chars="\0"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run=_launch)


def _run(args: argparse.Namespace) -> int:
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        raise ConfigError("check-launch: give a file, or a command")
    found = find_launch_lines(_text(words))
    if not found:
        raise ConfigError("no launch line was found: no torchrun, ft_launcher or python -m torch.distributed.run")
    for number, line in enumerate(found):
        if number:
            print()
        _show(line)
    other = _other_launcher()
    if other is not None:
        print(f"\n{other} is nvidia-resiliency-ext's: use `megatron-ft launch`, or put our ft_launcher first on PATH")
    return 1 if any(flag.meaning is Meaning.REFUSED for line in found for flag in line.flags) else 0


def _launch(args: argparse.Namespace) -> int:
    """The launcher is a process of its own, with nothing of this one loaded."""
    os.execv(sys.executable, [sys.executable, "-m", "megatron_ft.launcher", *args.arguments])


def _text(words: list[str]) -> str:
    if len(words) > 1:
        return shlex.join(words)
    if not os.path.exists(words[0]):
        if " " in words[0]:
            return words[0]
        raise ConfigError(f"there is no file {words[0]}")
    try:
        with open(words[0], errors="replace") as file:
            return file.read(_MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"can't read {words[0]}: {error.strerror}") from None


def _show(line: LaunchLine) -> None:
    print(f"{line.launcher}: {len(line.flags)} flags")
    shown = [" ".join(flag.words) for flag in line.flags]
    width = min(50, max(map(len, shown), default=0))
    for flag, words in zip(line.flags, shown, strict=True):
        note = f": {flag.note}" if flag.note else ""
        print(f"  {words.ljust(width)}  {flag.meaning.value}{note}")
    print(f"use:\n  {line.to_use}")


def _other_launcher() -> str | None:
    """The ft_launcher that a shell would find first, where it isn't ours."""
    path = shutil.which("ft_launcher")
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return path if b"nvidia_resiliency_ext" in file.read(_FIRST_BYTES) else None
    except OSError:
        return None


def find_launch_lines(text: str) -> list[LaunchLine]:
    """The launch lines in a command, or in a shell script; variables that it assigns itself are filled in."""
    text = text.replace("\\\n", " ")
    assigned = {name: " ".join(value.strip("()\"'").split()) for name, value in _ASSIGNED.findall(text)}
    return list(_in_text(text, assigned, _DEEPEST))


def _in_text(text: str, assigned: dict[str, str], depth: int) -> Iterator[LaunchLine]:
    for line in text.splitlines():
        try:
            words = shlex.split(_filled_in(line, assigned), comments=True)
        except ValueError:  # a quotation that goes over several lines
            words = _filled_in(line, assigned).replace("'", " ").replace('"', " ").split()
        if len(words) == 1 and re.match(r"\w+=", words[0]):  # an assignment, filled in where it is used
            continue
        inner = [word for word in words if depth and any(name in word for name in (*_PROGRAMS, *_MODULES))]
        for word in inner:
            if " " in word:
                yield from _in_text(word, assigned, depth - 1)
        found = _launcher_in(words)
        if found is not None:
            yield _read(words, *found)


def _filled_in(text: str, assigned: dict[str, str]) -> str:
    for _ in range(_DEEPEST):
        filled = _USED.sub(lambda match: assigned.get(match[1] or match[2], match[0]), text)
        if filled == text or len(filled) > 100_000:
            break
        text = filled
    return text


def _launcher_in(words: Sequence[str]) -> tuple[int, int] | None:
    """Where the launcher's words begin and end."""
    for at, word in enumerate(words):
        if word.rpartition("/")[2] in _PROGRAMS and not (at and words[at - 1] in _ONLY_NAMED_BY):
            return at, at + 1
        if word == "-m" and at + 1 < len(words) and words[at + 1] in _MODULES:
            interpreters = [i for i in range(max(0, at - 3), at) if "python" in words[i]]
            return (interpreters or [at])[-1], at + 2
        if word == "launch" and at and words[at - 1].rpartition("/")[2] == "megatron-ft":
            return at - 1, at + 1
    return None


def _read(words: Sequence[str], begin: int, end: int) -> LaunchLine:
    flags, at = [], end
    stop = next((i for i in range(end, len(words)) if words[i] in _ENDS), len(words))
    while at < stop and words[at].startswith("-") and words[at] != "-":
        taken, flag = _flag(words[at:stop])
        flags.append(flag)
        at += taken
    return LaunchLine(" ".join(words[begin:end]), tuple(words[:begin]), tuple(flags), tuple(words[at:stop]))


def _flag(words: Sequence[str]) -> tuple[int, Flag]:
    """The first flag of these words, and how many of them are its."""
    name, equals, value = words[0].partition("=")
    known = _known(name)
    if isinstance(known, (Option, TorchrunOption)) and known.is_flag:
        return 1, Flag((words[0],), *_of_torchrun(known) if isinstance(known, TorchrunOption) else (Meaning.WORKS, ""))
    taken = 1 if equals or len(words) == 1 or (known is None and words[1].startswith("-")) else 2
    if known is None and taken == 2 and words[1].endswith(".py"):
        taken = 1  # the script
    own = tuple(words[:taken])
    if not equals:
        value = words[1] if taken == 2 else ""
    if known is None:
        hint = nearest(name, _all_names())
        return taken, Flag(own, Meaning.REFUSED, f"unknown option{hint if 'did you mean' in hint else ''}")
    if isinstance(known, str):
        return taken, Flag(own, Meaning.IGNORED, IGNORED[known])
    if isinstance(known, TorchrunOption):
        return taken, Flag(own, *_of_torchrun(known, value))
    return taken, Flag(own, *_of_ours(known, value))


def _of_torchrun(option: TorchrunOption, value: str = "") -> tuple[Meaning, str]:
    if value and option.choices and "$" not in value and value not in option.choices:
        return Meaning.REFUSED, option.here
    return (Meaning.DIFFERS, option.here) if option.here else (Meaning.WORKS, "")


def _of_ours(option: Option, value: str) -> tuple[Meaning, str]:
    if "$" in value:
        return Meaning.WORKS, "its value is known at run time only"
    try:
        option.kind.judge(f"--{option.names[0]}", option.kind.read(value))
    except ConfigError as error:
        return Meaning.REFUSED, str(error)
    return Meaning.WORKS, ""


def _known(name: str) -> Option | TorchrunOption | str | None:
    """What a flag is; the text is the name of one that is ignored."""
    for option in (*FIELDS.values(), *LAUNCHER_OPTIONS.values()):
        if name in option.spellings:
            return option
    theirs = {word: each for each in TORCHRUN_OPTIONS.values() for word in each.spellings}
    if name in theirs:
        return theirs[name]
    for ignored in IGNORED:
        if name in (*spellings(f"ft-{ignored}"), *spellings(f"ft-param-{ignored}")):
            return ignored
    begun = {each.name: each for word, each in theirs.items() if word.startswith(name) and name.startswith("--")}
    return next(iter(begun.values())) if len(begun) == 1 else None


def _all_names() -> list[str]:
    ours = [f"--{each.names[0]}" for each in (*FIELDS.values(), *LAUNCHER_OPTIONS.values())]
    return [*ours, *(f"--{each.name}" for each in TORCHRUN_OPTIONS.values())]


def _quoted(word: str) -> str:
    # what the shell is to fill in stays as it is
    return f'"{word}"' if "$" in word and " " in word else word if "$" in word else shlex.quote(word)
