"""What the ranks will run, as far as the command line tells at a glance: before torch, which knows it, is imported.

A wrong guess is noticed when the command line is read, and costs the time since: nothing that a server does is seen
from outside.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from megatron_ft.core.errors import ConfigError
from megatron_ft.core.preload import parse_preload
from megatron_ft.ipc.ft_options import add_ft_options

__all__ = ["Glance", "glance", "shares_output"]

_WITH_VALUE = (
    *("nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts"),
    *("monitor-interval", "start-method", "event-log-handler", "role", "log-dir", "local-ranks-filter"),
    *("duplicate-stdout-filters", "duplicate-stderr-filters", "node-rank", "master-addr", "master-port", "local-addr"),
    *("logs-specs", "numa-binding", "signals-to-handle", "shutdown-timeout"),
)
_FLAGS = ("standalone", "no-python", "run-path", "virtual-local-rank")


class Glance(NamedTuple):
    """What to run ahead."""

    command: list[str]
    environment: dict[str, str]
    """The launcher's, with what torch will add for the ranks."""
    preload: tuple[str, ...]
    shares_output: bool
    """Standard output and standard error of the ranks go where those of the launcher do."""


def glance(argv: Sequence[str], environ: Mapping[str, str]) -> Glance | None:
    """None where ranks are to be fresh interpreters, and where nothing is to be run, or not by this Python."""
    try:
        found, preload = _parse(argv, environ)
    except (ConfigError, SystemExit):
        return None  # it is told later
    script = found.training_script
    if (
        found.help
        or preload is None
        or found.no_python
        or found.run_path
        or found.numa_binding
        or script == "-"
        or "${" in script
    ):
        return None
    command = [sys.executable, "-u", *(["-m"] if found.module else []), script, *found.training_script_args]
    environment = dict(environ)
    if "OMP_NUM_THREADS" not in environ and str(found.nproc_per_node).strip() != "1":
        environment["OMP_NUM_THREADS"] = "1"
    return Glance(command, environment, preload, shares_output(found))


def shares_output(namespace: argparse.Namespace) -> bool:
    """Whether the ranks' output goes where the launcher's goes, as far as torchrun's options tell."""
    return str(namespace.redirects) == str(namespace.tee) == "0" and namespace.logs_specs is None


def _parse(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[argparse.Namespace, tuple[str, ...] | None]:
    def default(name: str, otherwise: str | None = None) -> str | None:
        return environ.get(f"PET_{name.upper()}", otherwise)

    parser = argparse.ArgumentParser(add_help=False)
    for option in _WITH_VALUE:
        name = option.replace("-", "_")
        parser.add_argument(*{f"--{option}", f"--{name}"}, default=default(name, "1"), dest=name)
    parser.set_defaults(numa_binding=None, logs_specs=None)
    for option in _FLAGS:
        name = option.replace("-", "_")
        is_set = default(name, "0") == "1"
        parser.add_argument(*{f"--{option}", f"--{name}"}, action="store_true", default=is_set, dest=name)
    parser.add_argument("-m", "--module", action="store_true", default=default("module", "0") == "1")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-r", "--redirects", default=default("redirects", "0"))
    parser.add_argument("-t", "--tee", default=default("tee", "0"))
    add_ft_options(parser)
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)

    def error(message: str) -> NoReturn:
        raise ConfigError(message)

    parser.error = error  # type: ignore[method-assign]
    found = parser.parse_args(list(argv))
    return found, parse_preload(found.ft_preload)
