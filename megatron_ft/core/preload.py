"""What may be imported once for all ranks of a node, and when a rank has to be a fresh interpreter all the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ft.core.errors import ConfigError

__all__ = [
    "FORK_SERVER_NAME",
    "IDENTITY_VARIABLES",
    "KNOWN_TO_READ_RANK",
    "LearnedImport",
    "RankCommand",
    "differing_variables",
    "hidden_modules",
    "may_be_preloaded",
    "parse_preload",
    "read_command",
    "to_preload",
    "without",
]

FORK_SERVER_NAME = "ft_fork_server"
"""Of the process, as the kernel has it; what it forks has it, too, until it is a rank."""
IDENTITY_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "FT_CYCLE"),
    }
)
"""They tell a rank from another: a module that reads one while it is imported would tell all ranks the same."""
_READ_AT_IMPORT = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH")
_READ_LATER = ("TORCHELASTIC_", "TORCH_ELASTIC_", "TORCH_NCCL_")
_OURS = "megatron_ft"
KNOWN_TO_READ_RANK = ("lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics")
"""Not learned: each of them would be found out at the price of all the imports before it."""


@dataclass(frozen=True)
class RankCommand:
    """A Python script or module, and its arguments."""

    script: str
    is_module: bool
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class LearnedImport:
    """A module that a rank imported, and the file it came from."""

    name: str
    origin: str


def parse_preload(text: str | None) -> tuple[str, ...] | None:
    """The names of ``--ft-preload a,b``; None for "none": no fork server at all.

    Raises:
        ConfigError: something in it is no name of a module.
    """
    if text is None or not text.strip():
        return ()
    if text.strip().lower() == "none":
        return None
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(f"--ft-preload: {name!r} is no name of a module; give names as in a,b.c or none")
    return tuple(dict.fromkeys(names))


def read_command(argv: Sequence[str], interpreter: str) -> RankCommand | str:
    """What a rank runs, or why only a fresh interpreter can run it.

    torch builds these commands: interpreter, "-u", "-m" for a module, then what the user gave.
    """
    if argv[0] != interpreter:
        return "the ranks aren't run by this Python"
    if len(argv) < 3 or argv[1] != "-u":
        return "the ranks' interpreter has options of its own"
    if argv[2] == "-m":
        return RankCommand(argv[3], True, tuple(argv[4:])) if len(argv) > 3 else "there is no module"
    if argv[2].startswith("-"):
        return "the script isn't a file"
    return RankCommand(argv[2], False, tuple(argv[3:]))


def differing_variables(server: Mapping[str, str], rank: Mapping[str, str]) -> list[str]:
    """Variables that libraries read while they are imported, and that differ between the server and a rank."""
    names = {name for name in (*server, *rank) if name.startswith(_READ_AT_IMPORT)}
    return sorted(name for name in names if not name.startswith(_READ_LATER) and server.get(name) != rank.get(name))


def hidden_modules(names_beside_script: Iterable[str], imported: Collection[str]) -> list[str]:
    """Modules that were imported, and that a file beside the script would have been imported in place of.

    Args:
        names_beside_script: of modules in the directory that comes first in the ranks' ``sys.path``.
        imported: top-level names that the server found in later directories.
    """
    return sorted(set(names_beside_script).intersection(imported))


def may_be_preloaded(module: LearnedImport, roots: Sequence[str]) -> bool:
    """Whether a module belongs to an installed package (or to us), and not to the user's own files.

    Args:
        module: what a rank reported.
        roots: directories of installed packages and of the standard library, each with a final slash.
    """
    if module.name.partition(".")[0] in ("__main__", "__mp_main__", "sitecustomize", "usercustomize"):
        return False
    return module.name.partition(".")[0] == _OURS or module.origin.startswith(tuple(roots))


def to_preload(
    learned: Iterable[LearnedImport], *, roots: Sequence[str], dropped: Collection[str]
) -> list[LearnedImport]:
    """What the next server imports, in the order in which the rank did."""
    found = {module.name: module for module in learned if may_be_preloaded(module, roots)}
    return [module for module in found.values() if not is_dropped(module.name, dropped)]


def is_dropped(name: str, dropped: Collection[str]) -> bool:
    """Whether a module, or a package above it, is one of those."""
    parts = name.split(".")
    return any(".".join(parts[: count + 1]) in dropped for count in range(len(parts)))


def without(culprit: str, asked_for: Collection[str]) -> str:
    """The name to leave out after importing ``culprit`` made a server unfit to fork ranks.

    A package that does such a thing somewhere usually does it again elsewhere, so the whole of it goes; not
    torch, though, and not a package in which the user asked for something by name.
    """
    top = culprit.partition(".")[0]
    if culprit in asked_for or top in ("torch", _OURS):
        return culprit
    return culprit if any(name.partition(".")[0] == top for name in asked_for) else top
