"""Fault tolerance for a Megatron-style train loop: hooks around its setup, steps and saves.

Run the script with ``ft_launcher``, initialise the default process group, call :func:`setup`, and then each hook where
its name says. Before ``setup`` (with a warning), after :func:`shutdown` and with ``config.ft`` None, they do nothing;
so does ``setup``, after one warning, in a script that wasn't started with ``ft_launcher``. Configuration and state are
read by attribute only: Megatron-Bridge's own objects fit, and so do the plain ones of this module
(:class:`GlobalState` and what it holds).

===============  ==========================================================================================
section          is open
===============  ==========================================================================================
"setup"          from ``setup`` to the first training or evaluation step
"step"           in each step; the first of a run and of each evaluation is out of section, for it may be slow
"checkpointing"  in each save, and while an asynchronous one is finalised
===============  ==========================================================================================

The hooks run no collective, wait for nothing and open no file: they store words in the memory that the monitor reads.
(Rank 0 creates a missing save directory in ``setup``.)
With ``calc_ft_timeouts`` timeouts are learned outside this process, after each save and at the end, and the launcher
keeps them in ``<save>/ft_state.json`` for the next run. Without timeouts, hangs are only reported. Times are seconds.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from megatron_ft.errors import RankMonitorClientError
from megatron_ft.learning.messages import FACT_SAVED, FACT_SETUP_OPEN
from megatron_ft.learning.rule import reasons_against
from megatron_ft.learning.state_file import carry_out
from megatron_ft.learning.timeouts import OUT_OF_SECTION, StateFile
from megatron_ft.link.base.intervals import CHECKPOINTING, SECTIONS, SETUP, STEP
from megatron_ft.link.base.layout import FACT_ASYNC_SAVES, FACT_ENOUGH_STEPS, FACT_HOOKS, FACT_LEARNS, FACT_LOADED
from megatron_ft.rank.base import agreement, say, user_code
from megatron_ft.rank.base.connection import has_launcher
from megatron_ft.rank.client.client import RankMonitorClient
from megatron_ft.rank.faults import simulated
from megatron_ft.rank.faults.simulated import SimulatedFaultParams
from megatron_ft.rank.hooks import finished, hook_order, run_facts, safe_calls, user_errors
from megatron_ft.rank.hooks.loop_state import (
    CheckpointConfig,
    FaultToleranceSettings,
    FaultToleranceState,
    GlobalState,
    LoopConfig,
    TrainState,
    configured_warmup,
)

__all__ = [
    "CheckpointConfig",
    "FaultToleranceSettings",
    "FaultToleranceState",
    "GlobalState",
    "LoopConfig",
    "TrainState",
    "abort",
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

_NUM_WARMUP_ITERS: int = 1
_MIN_ITERS_FOR_STEP_TIMEOUT_UPDATE: int = 16

_STATE_FILE = "ft_state.json"
_END_OF_DATA = (StopIteration, StopAsyncIteration)
_NOT_CONFIRMED = "it isn't confirmed that the learned timeouts of this run are written: the next run may not know them"
_NOT_WRITTEN = "no timeouts of this run are written to a file: the next run will not know them"

_current_client: Any = None
"""Client of the latest ``setup``, for a simulated fault, which is given no state."""


def setup(config: Any, global_state: Any) -> None:
    """Connect this rank to its monitor and open "setup". Not a collective, and no file is opened.

    Rank 0 creates a missing save directory, as Megatron-Bridge does; a failure is a warning. Does nothing if
    ``config.ft`` is None, ``enable_ft_package`` is False, or there is no ``ft_launcher``. A second call closes the
    first client. The launcher reads ``<save>/ft_state.json``, if it exists, and applies its timeouts.

    Args:
        config: ``checkpoint.save``, ``checkpoint.async_save``, ``ft.calc_ft_timeouts`` and, optionally,
        ``ft.num_warmup_iters`` (see :class:`FaultToleranceSettings`).
        global_state: ``rank_monitor_client`` and ``fault_tolerance_state`` are set.

    Raises:
        ValueError: there is no save directory.
        RankMonitorClientError: the monitor refuses the rank; or there is no launcher, and FT_REQUIRE_LAUNCHER is 1.
    """
    global _current_client
    if config.ft is None or getattr(config.ft, "enable_ft_package", True) is False:
        hook_order.order.setup(is_on=False)
        return
    save = config.checkpoint.save
    if not save:
        raise ValueError("checkpointing save dir must be set for fault tolerance: config.checkpoint.save is empty")
    first = getattr(global_state, "rank_monitor_client", None)
    if first is not None:
        _disconnect(first, global_state)
    if getattr(global_state, "fault_tolerance_state", None) is None:
        global_state.fault_tolerance_state = FaultToleranceState()
    say.forget()
    client = RankMonitorClient()
    mine = run_facts.ours(client)
    is_on = mine is None or has_launcher()
    hook_order.order.setup(is_on=is_on)
    if not is_on:
        return

    ft_state = global_state.fault_tolerance_state
    ft_state.ft_state_path = os.path.join(save, _STATE_FILE)
    ft_state.is_async_chkpt_enabled = config.checkpoint.async_save
    ft_state.is_calculating_timeouts = config.ft.calc_ft_timeouts
    # a second run in the same process counts from 0
    ft_state.seen_tr_iters_cnt = ft_state.curr_eval_iter_idx = ft_state.seen_checkpoints_cnt = 0

    step = getattr(getattr(global_state, "train_state", None), "step", None)
    user_code.reports_iterations = type(step) is int
    warmup = configured_warmup(config)
    if mine is None:
        client.init_workload_monitoring(**({} if warmup is None else {"num_warmup_iters": warmup}))
    else:
        # the launcher has another working directory, and can't use the address of an object store
        path = "" if "://" in ft_state.ft_state_path else os.path.abspath(ft_state.ft_state_path)
        learns = bool(config.ft.calc_ft_timeouts)
        mine._connect(warmup, state_path=path, learns=learns)
        mine._add_sections(SECTIONS)
        mine._ready().set_facts(
            FACT_HOOKS
            | FACT_LEARNS * learns
            | FACT_ASYNC_SAVES * bool(config.checkpoint.async_save)
            | FACT_LOADED * bool(ft_state.is_persistent_chkpt_loaded)  # loaded before this call
        )
    global_state.rank_monitor_client = _current_client = client
    if mine is None:
        _load_state_if_exists(global_state)
    client.start_section(SETUP)
    ft_state.is_setup_section_open = True
    if get_rank_safe() == 0 and "://" not in save:  # an object store has no directories
        try:
            if not os.path.exists(save):
                os.makedirs(save, exist_ok=True)
        except OSError as error:  # an evaluation may never save: the loop's own save reports the error
            say.warn(f"the save directory {save} can't be created: {error.strerror or error}")


def on_training_step_start(global_state: Any) -> None:
    """Before each training step: close "setup", report the iteration, open "step" (not in the warm-up)."""
    client = _active_client(global_state)
    if client is None:
        return
    ft_state = global_state.fault_tolerance_state
    iteration = getattr(getattr(global_state, "train_state", None), "step", None)
    if type(iteration) is int and iteration >= 0:
        safe_calls.call(client.set_iteration, iteration)
    hook_order.order.step_begins()
    _close_setup(client, ft_state)
    if ft_state.seen_tr_iters_cnt >= _warmup_steps(global_state):
        safe_calls.start_section(client, STEP)
    ft_state.curr_eval_iter_idx = 0  # the next evaluation has its own warm-up
    simulated.on_step()


def on_training_step_end(global_state: Any) -> None:
    """After each training step: close "step" if it was opened."""
    client = _active_client(global_state)
    if client is None:
        return
    ft_state = global_state.fault_tolerance_state
    had_begun, mine = hook_order.order.step_ends(), run_facts.ours(client)
    if (had_begun or mine is None) and ft_state.seen_tr_iters_cnt >= _warmup_steps(global_state):
        safe_calls.end_section(client, STEP)
    ft_state.seen_tr_iters_cnt += 1
    if mine is not None and mine._recorder is not None:
        mine._recorder.step_ended(_least_steps_to_learn(global_state))


def on_eval_step_start(global_state: Any) -> None:
    """Before each evaluation step: close "setup" (a run may begin with an evaluation), open "step" (not in the
    warm-up)."""
    client = _active_client(global_state)
    if client is None:
        return
    ft_state = global_state.fault_tolerance_state
    _close_setup(client, ft_state)
    if ft_state.curr_eval_iter_idx >= _warmup_steps(global_state):
        safe_calls.start_section(client, STEP)


def on_eval_step_end(global_state: Any) -> None:
    """After each evaluation step: close "step" if it was opened."""
    client = _active_client(global_state)
    if client is None:
        return
    ft_state = global_state.fault_tolerance_state
    if ft_state.curr_eval_iter_idx >= _warmup_steps(global_state):
        safe_calls.end_section(client, STEP)
    ft_state.curr_eval_iter_idx += 1


def on_checkpointing_start(global_state: Any) -> None:
    """Before each save and each finalisation of an asynchronous one: open "checkpointing"."""
    client = _active_client(global_state)
    if client is not None:
        safe_calls.start_section(client, CHECKPOINTING)


def on_checkpointing_end(is_async_finalization: bool, global_state: Any) -> None:
    """After each save or finalisation: close "checkpointing". Learning, if any, happens outside this process.

    Args:
        is_async_finalization: True after a finalisation, which isn't counted as a save: it comes before each step and
        mostly does nothing.
        global_state: the state.
    """
    client = _active_client(global_state)
    if client is None:
        return
    safe_calls.end_section(client, CHECKPOINTING)
    if not is_async_finalization:
        global_state.fault_tolerance_state.seen_checkpoints_cnt += 1
        if (mine := run_facts.ours(client)) is not None:
            run_facts.note_save(mine)
        else:
            _maybe_update_timeouts(global_state)


def on_checkpoint_loaded(is_local_chkpt: bool, global_state: Any) -> None:
    """After a load: note whether it was persistent; only then is "setup" learned.

    A local checkpoint, kept in memory, loads so fast that a timeout learned from it would be too short for the next
    run's setup.
    """
    ft_state = getattr(global_state, "fault_tolerance_state", None)
    if ft_state is not None:
        ft_state.is_persistent_chkpt_loaded = not is_local_chkpt
    mine = run_facts.ours(getattr(global_state, "rank_monitor_client", None))
    if mine is not None and mine._recorder is not None:
        mine._recorder.set_facts(FACT_LOADED, not is_local_chkpt)


def shutdown(global_state: Any) -> None:
    """At the end of a run: close open sections and disconnect; hooks are no-ops again. Not a collective.

    With learned timeouts, rank 0 waits at most 2 s for the launcher to write them. Rank 0 writes
    ``FAULT_TOL_FINISHED_FLAG_FILE`` if ``cfg.train.train_iters`` iterations are completed. While an exception other
    than StopIteration or ``sys.exit(0)`` is handled or propagates, this is :func:`abort`.
    """
    client = getattr(global_state, "rank_monitor_client", None)
    if client is None:
        hook_order.order.shutdown(was_on=False)
        global_state.rank_monitor_client = None
        return
    failure = sys.exc_info()[1]
    # the end of the data, and sys.exit(0), end a finished loop or script
    is_normal = isinstance(failure, _END_OF_DATA) or (isinstance(failure, SystemExit) and failure.code in (None, 0))
    if failure is not None and not is_normal:
        if global_state.fault_tolerance_state.is_calculating_timeouts:
            say.warn(f"timeouts were not updated: {type(failure).__name__} is being handled; call shutdown() after it")
        abort(global_state)
        return
    try:
        safe_calls.call(client.end_all_sections)
        if (state := getattr(global_state, "fault_tolerance_state", None)) is not None:  # a mock may have none
            state.is_setup_section_open = False
        if (mine := run_facts.ours(client)) is None:
            _maybe_update_timeouts(global_state, is_closing_ft=True)
        else:
            learns = run_facts.learns(mine) or bool(getattr(state, "is_calculating_timeouts", False))
            is_written = run_facts.note_end(mine, waits=learns and get_rank_safe() == 0)
            if learns and is_written is not True:
                say.warn(_NOT_CONFIRMED if is_written is None else _NOT_WRITTEN)
    finally:
        _disconnect(client, global_state)
        hook_order.order.shutdown(was_on=True)
    finished.tell_if_finished(global_state)


def abort(global_state: Any) -> None:
    """Disconnect after a failure: no collective, no timeouts learned; hooks are no-ops again."""
    client = getattr(global_state, "rank_monitor_client", None)
    if client is not None:
        error, leave = sys.exc_info()[1], getattr(client, "_leave", None)  # another client than ours has none
        if error is not None and leave is not None:
            safe_calls.call(leave, error)
        _disconnect(client, global_state)
        hook_order.order.abort()


def maybe_setup_simulated_fault(config: Any) -> None:
    """Simulate a fault on one rank after a delay, and announce it, if ``config.simulate_fault``.

    A collective (one broadcast) if the rank or the type is random and there is a process group.

    Args:
        config: ``simulated_fault_type`` ("rank_killed", "rank_hung", "random": one of these, "slow",
            "exception"), ``simulated_fault_rank`` (None: a random one),
            ``simulated_fault_base_delay`` (seconds; up to 20 % are added). What only the training thread can do
            to itself (be slow, raise) it does in its first step after that delay.

    Raises:
        ValueError: a value is invalid; on all ranks alike. The launcher is asked not to restart.
    """
    if config is None or not config.simulate_fault:
        return
    delay, rank = config.simulated_fault_base_delay, config.simulated_fault_rank
    with user_errors.no_restart_for_mistakes():
        params = SimulatedFaultParams(config.simulated_fault_type, delay, None, rank)
        simulated.start(params, client=lambda: _current_client)


def get_rank_safe() -> int:
    """Return this process's rank, also without a process group."""
    return agreement.rank()


def _load_state_if_exists(global_state: Any) -> None:
    """Load ``ft_state.json`` into a foreign client, as Megatron-Bridge does."""
    client = getattr(global_state, "rank_monitor_client", None)
    if client is None or not os.path.exists(path := global_state.fault_tolerance_state.ft_state_path):
        return
    try:
        with open(path, encoding="utf-8") as file:
            state = json.load(file)
    except (OSError, ValueError) as error:
        say.warn(f"{path} can't be read ({error}): continuing with the configured timeouts")
        return
    client.load_state_dict(state)


def _update_timeouts(selected_sections: list[str], calc_out_of_section: bool, global_state: Any) -> None:
    """Have a foreign client learn the timeouts of these sections (a collective), and write its state."""
    client = getattr(global_state, "rank_monitor_client", None)
    if client is None:
        return
    path = global_state.fault_tolerance_state.ft_state_path
    try:
        client.calculate_and_set_section_timeouts(
            selected_sections=selected_sections, calc_out_of_section=calc_out_of_section
        )
    except RankMonitorClientError as error:
        # e.g. nothing observed: the training goes on under the old timeouts
        say.warn(f"timeouts were not updated: {error}")
        return
    if get_rank_safe() == 0:
        problem = "" if "://" in path else carry_out(StateFile(path, client.state_dict())).problem
        if problem or "://" in path:
            say.warn(f"{problem or f'{path} is no path of a file'}. A restart won't know these timeouts")


def _maybe_update_timeouts(global_state: Any, is_closing_ft: bool = False) -> None:
    """Have a foreign client learn what was observed sufficiently, if timeouts are to be learned."""
    client = getattr(global_state, "rank_monitor_client", None)
    if client is None:
        return
    ft_state = global_state.fault_tolerance_state
    if not ft_state.is_calculating_timeouts:
        return
    facts = (
        FACT_LOADED * bool(ft_state.is_persistent_chkpt_loaded)
        | FACT_SETUP_OPEN * (ft_state.is_setup_section_open is True)
        | FACT_ENOUGH_STEPS * (ft_state.seen_tr_iters_cnt >= _least_steps_to_learn(global_state))
        | FACT_SAVED * (ft_state.seen_checkpoints_cnt > 0)
        | FACT_ASYNC_SAVES * bool(ft_state.is_async_chkpt_enabled)
    )
    names = [name for name, reason in reasons_against(facts, is_closing=is_closing_ft).items() if not reason]
    if names:
        _update_timeouts(
            selected_sections=[name for name in names if name != OUT_OF_SECTION],
            calc_out_of_section=OUT_OF_SECTION in names,
            global_state=global_state,
        )


def _active_client(global_state: Any) -> Any:
    """Return the client to report to; None if the hook is a no-op."""
    client = getattr(global_state, "rank_monitor_client", None)
    if client is None:
        hook_order.order.without_client()
        return None
    cfg = getattr(global_state, "cfg", None)
    return None if cfg is not None and getattr(cfg, "ft", None) is None else client


def _close_setup(client: Any, ft_state: Any) -> None:
    if ft_state.is_setup_section_open:
        hook_order.order.first_step()
        safe_calls.end_section(client, SETUP)
        ft_state.is_setup_section_open = False


def _disconnect(client: Any, global_state: Any) -> None:
    global _current_client
    global_state.rank_monitor_client = _current_client = None
    ft_state = getattr(global_state, "fault_tolerance_state", None)
    if ft_state is not None:
        ft_state.is_setup_section_open = ft_state.is_persistent_chkpt_loaded = False
    safe_calls.call(client.shutdown_workload_monitoring)


def _warmup_steps(global_state: Any) -> int:
    """Return the number of steps that are out of section."""
    number = configured_warmup(getattr(global_state, "cfg", None))
    return _NUM_WARMUP_ITERS if number is None else number


def _least_steps_to_learn(global_state: Any) -> int:
    """Return the number of steps needed before "step" is learned: at least one is after the warm-up."""
    return max(_MIN_ITERS_FOR_STEP_TIMEOUT_UPDATE, _warmup_steps(global_state) + 1)
