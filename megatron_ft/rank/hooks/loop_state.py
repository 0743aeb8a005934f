"""State of train loops without Megatron-Bridge, as the functional module reads and writes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class CheckpointConfig:
    """Checkpoint settings of the loop."""

    save: str | None = None
    """Directory of the checkpoints and of ``ft_state.json``."""
    async_save: bool = False


@dataclass(kw_only=True)
class FaultToleranceSettings:
    """Fault-tolerance settings of the loop. Timeouts are the launcher's (``FaultToleranceConfig``)."""

    enable_ft_package: bool = True
    calc_ft_timeouts: bool = False
    """Learn timeouts from observed intervals, enforce them, and keep them in ``ft_state.json``."""
    num_warmup_iters: int | None = None
    """Number of first steps of a run, and of each evaluation, that are out of section. Until the training has made
    them, the timeout out of section is at least ``initial_rank_heartbeat_timeout``. None: the first step is out of
    section, with the usual timeout."""
    simulate_fault: bool = False
    simulated_fault_type: str = "random"
    """One of ``rank.faults.plan.FAULT_TYPES``, or ``random``: ``rank_killed`` or ``rank_hung``."""
    simulated_fault_rank: int | None = None
    """Rank that fails; None for a random one."""
    simulated_fault_base_delay: float = 0.0
    """Seconds from the call to the fault; up to 20 % are added at random."""


@dataclass(kw_only=True)
class TrainingConfig:
    """Length of the training."""

    train_iters: int | None = None
    """Iterations of the whole training; None if unknown."""


@dataclass(kw_only=True)
class LoopConfig:
    """Training configuration, as far as the hooks use it."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    ft: FaultToleranceSettings | None = None
    """Settings of fault tolerance; with None, every hook is a no-op."""
    train: TrainingConfig = field(default_factory=TrainingConfig)


@dataclass(kw_only=True)
class TrainState:
    """Training state, as far as the hooks use it."""

    step: int = 0
    """Iterations completed, which is the number of the current one."""


@dataclass(kw_only=True)
class FaultToleranceState:
    """State of the functional module between its hooks."""

    ft_state_path: str | None = None
    is_persistent_chkpt_loaded: bool = False
    is_async_chkpt_enabled: bool = False
    is_calculating_timeouts: bool = False
    is_setup_section_open: bool = False
    seen_checkpoints_cnt: int = 0
    seen_tr_iters_cnt: int = 0
    curr_eval_iter_idx: int = 0


@dataclass(kw_only=True)
class GlobalState:
    """Argument of every hook."""

    cfg: LoopConfig | None = None
    train_state: TrainState | None = None
    rank_monitor_client: Any = None
    """Set by ``setup``, None again after ``shutdown``."""
    fault_tolerance_state: FaultToleranceState = field(default_factory=FaultToleranceState)

    @staticmethod
    def create(
        *,
        save: str | None,
        async_save: bool = False,
        ft: FaultToleranceSettings | None,
        train_iters: int | None = None,
    ) -> GlobalState:
        """Return a state with its configuration inside (``state.cfg``), for ``setup(state.cfg, state)``."""
        checkpoint = CheckpointConfig(save=save, async_save=async_save)
        config = LoopConfig(checkpoint=checkpoint, ft=ft, train=TrainingConfig(train_iters=train_iters))
        return GlobalState(cfg=config, train_state=TrainState())


def configured_warmup(config: Any) -> int | None:
    """Return ``config.ft.num_warmup_iters``, None in configurations of other packages, which lack it."""
    number = getattr(getattr(config, "ft", None), "num_warmup_iters", None)
    return number if type(number) is int else None
