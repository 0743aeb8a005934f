"""Python stacks as `faulthandler` writes them, and the frame of interest to a person. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron_ft.link.base.codec import Fact, Int

REPORTER_THREAD = "megatron_ft_crash_reporter"
"""Name of the thread with which a rank answers its monitor, and of that thread's function: faulthandler knows no names
of threads."""
STAND_IN = "megatron_ft_stand_in"
"""Name of each function of this package that replaces another one, which it calls: never the place of a rank."""
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[.*\])? \(most recent call first\):(?: (<.*>))?$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?+) in (.*)$')
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|^<frozen |^<eval_with_key>|/torchinductor_[^/]*/|/\.triton/cache/|/c[a-z2-7]{51}\.py$"
)
"""Files of installed packages, and those that torch and Triton generate, named after what they hold."""
_INNERMOST = 30
_OURS = __file__.rsplit("/", 2)[0] + "/"


class Frame(NamedTuple):
    """One call and its current line; ``line`` is 0 if unknown."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Return "data_loader.py:88 next_batch"."""
        name = self.file.rpartition("/")[2]
        return f"{name}:{self.line} {self.function}"


class ThreadStack(Fact, frozen=True):
    """One thread, innermost call first.

    Args:
        ident: its ``threading.get_ident()``.
    """

    ident: Int
    frames: tuple[Frame, ...]
    name: str = ""
    main: bool = False


def parse_faulthandler(text: str) -> list[ThreadStack]:
    """Return the threads of one dump, ignoring other lines and calls of stand-ins."""
    found: list[tuple[int, list[Frame]]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            found.append((int(head[1], 16), []))
        elif found and (call := _FRAME.match(line)) and call[3] != STAND_IN:
            found[-1][1].append(Frame(call[1], int(call[2]) if call[2].isdigit() else 0, call[3]))
    return [ThreadStack(ident, tuple(frames)) for ident, frames in found]


def main_stack(stacks: Sequence[ThreadStack], main_ident: int) -> tuple[Frame, ...]:
    """Return the calls of the thread with this number, innermost first; empty if it is missing."""
    return next((stack.frames for stack in stacks if stack.ident == main_ident), ())


def user_frame(frames: Sequence[Frame], *, library: Iterable[str] = ()) -> Frame | None:
    """Return the innermost call in the user's own code; if there is none, the innermost outside this package.

    ``library``: directories of files that aren't the user's, beside installed packages and this one.
    """
    places = tuple(library)
    others = [frame for frame in frames if not frame.file.startswith(_OURS)]
    own = (frame for frame in others if not is_library(frame.file, places))
    return next(own, next(iter([*others, *frames]), None))


def is_library(file: str, places: Sequence[str]) -> bool:
    """Return True if a file belongs to Python, to an installed package, or to one of ``places``."""
    return _LIBRARY.search(file) is not None or any(file.startswith(place + "/") for place in places)


def shortened(frames: Sequence[Frame], *, library: Iterable[str], most: int) -> tuple[Frame, ...]:
    """Return at most about ``most`` calls of a deep stack: the innermost, the outermost, and the user's between."""
    places = tuple(library)
    outer = [frame for frame in frames[_INNERMOST:-1] if not is_library(frame.file, places)]
    return (*frames[:_INNERMOST], *outer[: most - _INNERMOST - 1], *frames[_INNERMOST:][-1:])
