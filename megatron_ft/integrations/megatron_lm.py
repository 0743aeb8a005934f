"""Megatron-LM's ``ft_integration``: the same names, on :mod:`megatron_ft.fault_tolerance`.

Under ``ft_launcher`` an unmodified Megatron-LM needs none of this (docs/reference-names.md). Where that isn't wanted,
one file of a checkout, ``megatron/training/ft_integration.py``, becomes the line ::

    from megatron_ft.integrations.megatron_lm import *

The hooks take no arguments: there is one training in a process, and this module holds its state. Before :func:`setup`
and after :func:`shutdown` they do nothing.

Sections, learning, and ``<save>/ft_state.json`` are those of ``megatron_ft.fault_tolerance``.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from megatron_ft import fault_tolerance as ft
from megatron_ft.errors import ConfigError
from megatron_ft.rank.faults import simulated

__all__ = [
    "get_rank_monitor_client",
    "maybe_setup_simulated_fault",
    "on_checkpoint_loaded",
    "on_checkpointing_end",
    "on_checkpointing_start",
    "on_eval_step_end",
    "on_eval_step_start",
    "on_training_step_end",
    "on_training_step_start",
    "setup",
    "shutdown",
]

_GLOBAL_VARS = "megatron.training.global_vars"
_ARGUMENTS = "megatron.training.arguments"

_state = ft.GlobalState()
_args: Any = None
"""Arguments of ``setup``; None: Megatron-LM's own are looked up on use."""


def setup(args: Any = None) -> None:
    """Connect this rank to its monitor and open "setup"; a second call begins anew.

    Does nothing unless ``args.enable_ft_package``. May be called before or after the process group is initialised.

    Args:
        args: ``enable_ft_package, save``, and optionally ``async_save, calc_ft_timeouts, ft_num_warmup_iters,
        curr_iteration, train_iters, iteration``. None: Megatron-LM's global arguments or, before it has them, those it
        parses from the command line.

    Raises:
        ConfigError: there are no arguments, or they aren't of this kind (a ValueError).
        ValueError: there is no save directory.
        RankMonitorClientError: the monitor refuses the rank; or there is no launcher, and FT_REQUIRE_LAUNCHER is 1.
    """
    global _args
    found = _megatron_args() if args is None else args
    if not hasattr(found, "enable_ft_package"):
        raise ConfigError("the arguments have no enable_ft_package")
    _args = args
    if not found.enable_ft_package:
        return
    config = ft.LoopConfig(
        checkpoint=ft.CheckpointConfig(
            save=getattr(found, "save", None), async_save=bool(getattr(found, "async_save", False))
        ),
        ft=ft.FaultToleranceSettings(
            calc_ft_timeouts=bool(getattr(found, "calc_ft_timeouts", False)),
            num_warmup_iters=getattr(found, "ft_num_warmup_iters", None),
        ),
    )
    _state.cfg = config
    ft.setup(config, _state)
    maybe_setup_simulated_fault()  # no version of Megatron-LM since 0.16 calls it


def on_training_step_start() -> None:
    """Before each training step; reports ``args.curr_iteration``, if it exists, as the iteration."""
    iteration = getattr(_current_args(), "curr_iteration", None)
    _state.train_state = ft.TrainState(step=iteration) if isinstance(iteration, int) else None
    ft.on_training_step_start(_live_state())


def on_training_step_end() -> None:
    """After each training step."""
    if _state.train_state is not None:
        _state.train_state.step += 1
    ft.on_training_step_end(_live_state())


def on_eval_step_start() -> None:
    """Before each evaluation step."""
    ft.on_eval_step_start(_live_state())


def on_eval_step_end() -> None:
    """After each evaluation step."""
    ft.on_eval_step_end(_live_state())


def on_checkpointing_start() -> None:
    """Before each save, and before each finalisation of an asynchronous one."""
    ft.on_checkpointing_start(_live_state())


def on_checkpointing_end(is_async_finalization: bool) -> None:
    """After each save or finalisation. Not a collective: timeouts are learned outside this process."""
    ft.on_checkpointing_end(is_async_finalization, _live_state())


def on_checkpoint_loaded(is_local_chkpt: bool) -> None:
    """After a load; ``is_local_chkpt``: from memory or a local disk, so fast that "setup" isn't learned from it."""
    ft.on_checkpoint_loaded(is_local_chkpt, _live_state())


def shutdown() -> None:
    """At the end of a run: close open sections and disconnect. Not a collective.

    If ``args.train_iters`` iterations are completed, rank 0 writes ``FAULT_TOL_FINISHED_FLAG_FILE``.
    """
    _note_iterations(_current_args())
    ft.shutdown(_live_state())


def get_rank_monitor_client() -> Any:
    """Return the client; None before :func:`setup`, after :func:`shutdown`, and without ``--enable-ft-package``."""
    return _live_state().rank_monitor_client


def maybe_setup_simulated_fault() -> None:
    """Simulate a fault on one rank after a delay, as ``FT_SIM_FAULT_DESC`` says.

    The variable holds ``type;rank;delay``: one of ``rank.faults.plan.FAULT_TYPES`` or ``random``, a rank or nothing (a
    random one), and seconds, to which up to 20 % are added. A collective if something is random.

    Raises:
        ConfigError: the variable is invalid (a ValueError); on all ranks alike. The launcher is asked not to restart.
    """
    simulated.start_described(client=get_rank_monitor_client)


def _live_state() -> ft.GlobalState:
    """Return the state. Some versions of Megatron-LM shut the client down themselves and then go on calling hooks."""
    client = _state.rank_monitor_client
    if client is not None and not getattr(client, "is_initialized", True):
        ft.abort(_state)
    return _state


def _note_iterations(args: Any) -> None:
    """Note how many iterations there are, and how many are completed, possibly all before this run."""
    last, loaded = getattr(args, "train_iters", None), getattr(args, "iteration", None)
    if _state.cfg is not None:
        _state.cfg.train.train_iters = last if isinstance(last, int) else None
    if isinstance(loaded, int) and (_state.train_state is None or _state.train_state.step < loaded):
        _state.train_state = ft.TrainState(step=loaded)


def _current_args() -> Any:
    """Return the arguments that the train loop updates. ``setup`` may have come before Megatron-LM had them."""
    return _global_args(sys.modules.get(_GLOBAL_VARS)) if _args is None else _args


def _megatron_args() -> Any:
    try:
        global_vars = importlib.import_module(_GLOBAL_VARS)
    except ImportError as error:
        raise ConfigError(
            f"setup() takes the arguments from Megatron-LM, which can't be imported ({error}): give them, setup(args)"
        ) from None
    args = _global_args(global_vars)
    if args is None:  # not yet: newer versions call setup() before they initialise themselves
        args = importlib.import_module(_ARGUMENTS).parse_args(ignore_unknown_args=True)
    return args


def _global_args(global_vars: Any) -> Any:
    if global_vars is None:
        return None
    try:
        return global_vars.get_args()
    except AssertionError:  # raised before it has any
        return None
