"""The schedulers, which of them has started this launcher, and the options that are taken from it."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Collection, Mapping
from dataclasses import replace

from torch.distributed import run as torchrun

from megatron_ft.config import launcher_options
from megatron_ft.config.torchrun import ETCD_BACKENDS
from megatron_ft.errors import ConfigError
from megatron_ft.launcher.schedulers.facts import SchedulerEnvironment, number

_PLACES = {"rdzv_endpoint", "master_addr", "master_port"}


SCHEDULERS = {
    name: importlib.import_module(f"megatron_ft.launcher.schedulers.{name}") for name in launcher_options.SCHEDULERS
}
"""By the value of ``--scheduler``, in the order in which "auto" looks for them."""


def detect(environ: Mapping[str, str], choice: str = "auto", *, full_name: str = "") -> SchedulerEnvironment:
    """Return the facts. ``choice`` is that of ``--scheduler``; ``full_name`` is this host's, with its domain.

    Raises:
        ConfigError: there is no sign of it.
    """
    for name, scheduler in SCHEDULERS.items():
        if choice in ("auto", name):
            found: SchedulerEnvironment | None = scheduler.detect(environ, full_name=full_name, is_asked=choice == name)
            if found is not None:
                return found
    return SchedulerEnvironment()


def rank(environ: Mapping[str, str], *, given: int | None = None, min_nodes: int, max_nodes: int) -> int | None:
    """Return this launcher's rank among the job's: the one that the user gave, else the scheduler's; None without."""
    if given is not None:
        return given
    names = [each.rank_variable(environ, min_nodes, max_nodes) for each in SCHEDULERS.values()]
    return next((value for name in ("GROUP_RANK", *names) if (value := number(environ, name)) is not None), None)


def take(namespace: argparse.Namespace, given: Collection[str], where: SchedulerEnvironment) -> str:
    """Fill in options that aren't ``given`` (names). Return the line for the user; empty if nothing was taken.

    Raises:
        ConfigError: the scheduler has started launchers that would stand in each other's way.
    """
    if namespace.standalone:
        return ""
    taken = {}
    if where.surplus and (("nnodes" not in given) or _most(namespace.nnodes) not in (1, where.launchers)):
        raise ConfigError(
            f"{where.surplus}, start one per node: srun --ntasks-per-node=1. (To use each launcher as a node: "
            f"--nnodes {where.launchers}; as a job of its own: --standalone)"
        )
    if where.nodes is not None and "nnodes" not in given:
        taken["--nnodes"] = namespace.nnodes = str(where.nodes)
    if _most(namespace.nnodes) == 1:
        return ""
    if where.endpoint and _PLACES.isdisjoint(given) and namespace.rdzv_backend not in ETCD_BACKENDS:
        if "rdzv_backend" not in given:
            namespace.rdzv_backend = "c10d"
        taken["--rdzv-endpoint"] = namespace.rdzv_endpoint = where.endpoint
    if where.run_id and "rdzv_id" not in given:
        taken["--rdzv-id"] = namespace.rdzv_id = where.run_id
    if not taken:
        return ""
    told = ", ".join(f"{option} {value}" for option, value in taken.items())
    return f"{where.scheduler.capitalize()} {where.job}: {told} (--scheduler none disables this)"


def own_logs(namespace: argparse.Namespace, where: SchedulerEnvironment) -> SchedulerEnvironment:
    """Return ``where`` with a log directory for this launcher alone if its job is one of several of the same step."""
    is_alone = namespace.standalone or _most(namespace.nnodes) == 1
    return replace(where, log_name=where.own_log_name) if is_alone and where.own_log_name else where


def doubt(namespace: argparse.Namespace, given: Collection[str], where: SchedulerEnvironment) -> str:
    """Return a warning if srun seems to have been forgotten, else an empty text. ``nnodes`` is filled in by now."""
    if not where.hint or namespace.standalone:
        return ""
    most = _most(namespace.nnodes)
    if "nnodes" not in given:
        what = "ranks start on this node alone"
    elif most is not None and most > 1:
        what = f"it waits for the other nodes' launchers (--nnodes {namespace.nnodes})"
    else:
        return ""  # as the user wants
    return (
        f"{where.hint}: {what}. To start a launcher on each node: srun --ntasks-per-node=1 --kill-on-bad-exit=0 "
        "--wait=0 --no-kill ft_launcher ..."
    )


def _most(nnodes: str) -> int | None:
    try:
        return int(torchrun.parse_min_max_nnodes(nnodes)[1])
    except (ValueError, RuntimeError):
        return None  # refused elsewhere
