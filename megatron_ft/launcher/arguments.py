"""The command line: torchrun's own parser with this package's options; user errors are one line."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import socket
import sys
import uuid
from collections.abc import Collection, Sequence
from importlib.machinery import PathFinder
from typing import NoReturn

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic import events
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.launcher.api import LaunchConfig

import megatron_ft
from megatron_ft.config.config import OPTIONS
from megatron_ft.config.files.options import (
    add_ft_options,
    read_ft_options,
    with_hint,
)
from megatron_ft.config.files.yaml_file import FaultToleranceConfig
from megatron_ft.config.torchrun import C10D_PORT, DEFAULT_PORT, TORCHRUN_OPTIONS
from megatron_ft.errors import ConfigError
from megatron_ft.launcher.base import directories
from megatron_ft.launcher.base.command_line import CommandLine, rendezvous_settings
from megatron_ft.launcher.coordination import meeting_place
from megatron_ft.launcher.help import group_help
from megatron_ft.launcher.processes import ending_together
from megatron_ft.launcher.schedulers.schedulers import detect, doubt, own_logs, take

_USE_COORDINATOR = (
    "nodes meet at the coordinator that ft_launcher starts, use --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
)
_POD_GRACE_S = 30.0
"""Kubernetes' default."""
DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_TELLS = ("nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "node_rank", "master_addr", "master_port")
"""Options whose being given matters; those not given may be taken from the scheduler."""


def parse(argv: Sequence[str]) -> CommandLine:
    """Read and check the command line.

    Raises:
        ConfigError: a user error.
        SystemExit: ``--help``, ``--help-all``, ``--version``.
    """
    parser = torchrun.get_args_parser()
    parser.prog = "ft_launcher"
    parser.description = "torchrun that detects hung and failed ranks, reports which and why, and restarts fast."
    add_ft_options(parser)
    version = f"ft_launcher {megatron_ft.__version__} (torch {torch.__version__})"
    parser.add_argument("--version", action="version", version=version)
    group_help(parser)

    def error(message: str) -> NoReturn:
        raise ConfigError(with_hint(message, parser))

    parser.error = error  # type: ignore[method-assign]
    # without torchrun's defaults the parser tells which options were given
    defaults = {name: parser.get_default(name) for name in _TELLS if f"PET_{name.upper()}" not in os.environ}
    parser.set_defaults(**dict.fromkeys(defaults))
    namespace = parser.parse_args(list(argv))
    given = frozenset(name for name in _TELLS if getattr(namespace, name) is not None)
    for name in _TELLS:
        if name not in given:
            setattr(namespace, name, defaults[name])
    node_rank = namespace.node_rank if "node_rank" in given else None
    if node_rank is not None and node_rank < 0:
        raise ConfigError(f"--node-rank: {node_rank} is negative")
    _check_backend(namespace)
    options = read_ft_options(namespace)
    if (prefix := options.per_cycle_applog_prefix) is not None:
        if not os.path.isabs(prefix):
            raise ConfigError(
                f"--ft-per-cycle-applog-prefix: {prefix!r} must begin with /: it is the same on all nodes"
            )
        if namespace.logs_specs is not None:
            raise ConfigError("--ft-per-cycle-applog-prefix and --logs-specs exclude each other")
        namespace.tee = namespace.redirects = "3"  # of all ranks, to files, from where they are copied
    where = detect(os.environ, options.scheduler, full_name=full_name())
    taken = take(namespace, given, where)
    where = own_logs(namespace, where)
    options.warnings.extend(filter(None, (*where.warnings, doubt(namespace, given, where))))
    handled = _read_torchrun_options(namespace, options)
    seconds = options.term_timeout
    if where.are_pods and seconds >= _POD_GRACE_S:
        options.warnings.append(
            f"Kubernetes kills a pod {_POD_GRACE_S:g} s after SIGTERM, unless its terminationGracePeriodSeconds "
            f"says otherwise: set that to more than --term-timeout {seconds:g}, the time ranks have to save"
        )
    min_nodes, max_nodes = _check_sizes(namespace)
    if "rdzv_backend" in given and namespace.rdzv_backend == "static" and not namespace.standalone:
        min_nodes = max_nodes  # as torchrun has it
    _fill_in_rendezvous(namespace, given, max_nodes)
    _check_script(namespace, options.preload or ())
    line = CommandLine(
        namespace=namespace,
        options=options,
        signals=handled,
        signals_are_default=getattr(namespace, "signals_to_handle", DEFAULT_SIGNALS) == DEFAULT_SIGNALS,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        node_rank=node_rank,
        where=where,
        is_named="rdzv_id" in given and namespace.rdzv_id not in ("", "none"),
        taken=taken,
    )
    meeting_place.check(line)
    return line


def _read_torchrun_options(namespace: argparse.Namespace, config: FaultToleranceConfig) -> tuple[signal.Signals, ...]:
    """Take torchrun's ``--shutdown-timeout``, unless --term-timeout is set. Return the signals that stop the job.

    Raises:
        ConfigError: one is no number of seconds; a signal is unknown, can't be handled, or is to be forwarded.
    """
    seconds = getattr(namespace, "shutdown_timeout", None)
    seconds = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") if seconds is None else seconds
    if seconds is not None and not config.is_set("term_timeout"):
        known = OPTIONS["term_timeout"]
        config.put(known, known.kind.parse("--shutdown-timeout", str(seconds)), "--shutdown-timeout")
    numbers = []
    # torch 2.6 has no such option
    for name in (getattr(namespace, "signals_to_handle", None) or DEFAULT_SIGNALS).split(","):
        number = getattr(signal.Signals, name.strip().upper(), None)
        if number is None or number in (signal.SIGKILL, signal.SIGSTOP):
            raise ConfigError(f"--signals-to-handle: {name.strip()!r} is no signal that can be handled")
        numbers.append(number)
    # without SIGTERM and SIGINT the job could not be ended in an orderly way
    handled = tuple(dict.fromkeys([*numbers, signal.SIGTERM, signal.SIGINT]))
    if both := [number.name for number in config.forward_signals if number in handled]:
        raise ConfigError(
            f"--ft-forward-signals: {both[0]} ends the job (it is one of --signals-to-handle), so it can't be "
            "forwarded without ending it"
        )
    return handled


def full_name() -> str:
    """Return this host's full name in its own table of hosts: no name server is asked."""
    host = socket.gethostname()
    try:
        with open("/etc/hosts") as file:
            names = [name for line in file for name in line.partition("#")[0].split()[1:]]
    except (OSError, ValueError):
        return host
    return next((name for name in names if name.startswith(f"{host}.")), host)


def torch_launch_config(line: CommandLine, *, log_dir: str | None) -> tuple[LaunchConfig, list[str]]:
    """Return torch's configuration, and the command of a rank.

    With ``log_dir`` None, or a ``--log-dir`` that can't be made, the ranks write to the launcher's own output.

    Raises:
        ConfigError: a user error found by torch.
    """
    namespace = line.namespace
    if namespace.log_dir is None and namespace.logs_specs is None:
        # otherwise torch makes a directory in /tmp for the ranks' error files and leaves it there
        namespace.log_dir = os.devnull if log_dir is None else os.path.join(log_dir, directories.TORCH_LOGS)
    try:
        try:
            config, command, arguments = torchrun.config_from_args(namespace)
        except OSError as error:
            if isinstance(error, (NotADirectoryError, FileExistsError)):
                raise ConfigError(f"--log-dir: {error}") from error
            line.options.warnings.append(
                f"could not create the ranks' log files; ranks write to the launcher's output: {error}"
            )
            namespace.log_dir = os.devnull
            config, command, arguments = torchrun.config_from_args(namespace)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ConfigError(str(error)) from error
    _check_what_torch_finds_too_late(namespace)
    if config.nproc_per_node < 1:
        raise ConfigError(f"--nproc-per-node: {config.nproc_per_node} ranks per node, at least 1 is needed")
    if namespace.run_path:
        script, *rest = arguments
        return config, ending_together.command(script, rest)
    assert isinstance(command, str), command
    if shutil.which(command) is None:
        raise ConfigError(f"{command}: no such command")
    return config, [command, *arguments]


def _check_what_torch_finds_too_late(namespace: argparse.Namespace) -> None:
    """Check settings that torch checks only with a traceback, when the ranks are about to start."""
    handler = getattr(namespace, "event_log_handler", None)  # torch 2.6 and 2.7 have no such option
    if handler is not None:
        try:
            vars(events)["get_logging_handler"](handler)
        except KeyError:
            raise ConfigError(f"--event-log-handler: torch knows no {handler!r}") from None
    if "NVRX_GPUS_PER_NUMA" in os.environ:
        raise ConfigError("NVRX_GPUS_PER_NUMA binds nothing here: unset it, and use --numa-binding node")
    if getattr(namespace, "numa_binding", None) is not None:
        if not torch.cuda.is_available():
            raise ConfigError("--numa-binding binds ranks to the CPUs of their GPUs, and torch finds no CUDA GPU here")
        if shutil.which("numactl") is None:
            raise ConfigError("--numa-binding needs the command numactl, which isn't installed here")


def _check_sizes(namespace: argparse.Namespace) -> tuple[int, int]:
    """Check numbers that torch would refuse with a traceback. Return the least and the greatest number of nodes."""
    try:
        min_nodes, max_nodes = torchrun.parse_min_max_nnodes(namespace.nnodes)
    except (ValueError, RuntimeError):
        raise ConfigError(f"--nnodes: {namespace.nnodes!r} is neither a number nor MIN:MAX") from None
    if not 0 < min_nodes <= max_nodes:
        raise ConfigError(f"--nnodes: {namespace.nnodes!r} must be 0 < MIN <= MAX")
    if namespace.max_restarts < 0:
        raise ConfigError(f"--max-restarts: {namespace.max_restarts} is negative")
    if not namespace.monitor_interval > 0:
        raise ConfigError(f"--monitor-interval: {namespace.monitor_interval} must be greater than 0")
    if namespace.no_python and namespace.module:
        raise ConfigError("--no-python and --module (-m) exclude each other")
    for option, value in (("--redirects", namespace.redirects), ("--tee", namespace.tee)):
        try:
            Std.from_str(str(value))
        except ValueError:
            allowed = "0 (nothing), 1 (output), 2 (errors), 3 (both) or RANK:N,..."
            raise ConfigError(f"{option}: {value!r} must be {allowed}") from None
    return int(min_nodes), int(max_nodes)


def _fill_in_rendezvous(namespace: argparse.Namespace, given: Collection[str], max_nodes: int) -> None:
    """Fill in what torchrun's ``run`` does, and a meeting place for nodes without one."""
    names_no_place = (
        namespace.rdzv_backend == "static"
        and not namespace.rdzv_endpoint
        and namespace.master_port is None
        and max_nodes == 1
    )
    if namespace.standalone or names_no_place:
        namespace.rdzv_backend = "c10d"
        namespace.rdzv_endpoint = "localhost:0"
        namespace.rdzv_id = ("rdzv_id" in given and namespace.rdzv_id) or str(uuid.uuid4())
    if namespace.master_port is None:
        namespace.master_port = DEFAULT_PORT
    if namespace.rdzv_backend == "c10d":
        if not namespace.rdzv_endpoint:
            by_default = "localhost:0" if max_nodes == 1 else f"localhost:{C10D_PORT}"
            master = f"{namespace.master_addr}:{namespace.master_port}"
            namespace.rdzv_endpoint = by_default if {"master_addr", "master_port"}.isdisjoint(given) else master
        namespace.node_rank = 0  # torch would warn that it is ignored, and it isn't: see CommandLine.node_rank


def _check_backend(namespace: argparse.Namespace) -> None:
    """Refuse what torch's own rendezvous would serve: nodes meet at the coordinator."""
    if namespace.standalone:
        return
    if namespace.rdzv_backend not in TORCHRUN_OPTIONS["rdzv_backend"].choices:
        raise ConfigError(f"--rdzv-backend: {namespace.rdzv_backend!r} is not supported: {_USE_COORDINATOR}")
    store_type = rendezvous_settings(namespace).get("store_type", "tcp")
    if store_type.lower() != "tcp":
        raise ConfigError(f"--rdzv-conf: store_type={store_type} is not supported: {_USE_COORDINATOR}")


def _check_script(namespace: argparse.Namespace, preload: Sequence[str]) -> None:
    """Check that Python will find the script, and modules that are named."""
    script = namespace.training_script
    named = [("--ft-preload", name) for name in preload] + [("-m", script)] * bool(namespace.module)
    for option, module in [] if "PYTHON_EXEC" in os.environ else named:  # another Python's packages aren't known here
        package = module.partition(".")[0]
        # ranks search the working directory as well; nothing is imported
        found = package and PathFinder.find_spec(package, [os.getcwd(), *sys.path])
        if not found and package not in sys.modules and not (package and importlib.util.find_spec(package)):
            raise ConfigError(f"{option} {module}: Python finds no module {package!r} here")
        inside = found and found.submodule_search_locations
        if option == "-m" and module == package and inside and not PathFinder.find_spec(f"{package}.__main__", inside):
            raise ConfigError(f"-m {module}: the package has no __main__.py: Python can't run it")
    if namespace.module or (namespace.no_python and not namespace.run_path):
        return  # found by Python or in PATH
    # "-" is standard input; ${local_rank} in a path is filled in for each rank
    if script == "-" or "${" in script:
        return
    if not os.path.exists(script):
        raise ConfigError(f"there is no script {script}")
    if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise ConfigError(f"{script} is a directory without a __main__.py: Python can't run it")
