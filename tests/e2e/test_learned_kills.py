"""A learned timeout that ends a healthy rank: once, and not again."""

from __future__ import annotations

from pathlib import Path

from tests.support.launching import Launcher, launcher

__all__ = ["launcher"]

# every 40th step takes forty times as long, also when the job comes to it again
LOOP = """
from megatron_ft import fault_tolerance as ft
save, slow_s = sys.argv[1], float(sys.argv[2])
settings = ft.FaultToleranceSettings(calc_ft_timeouts=True)
state = ft.GlobalState.create(save=save, ft=settings)
ft.setup(state.cfg, state)
checkpoint = os.path.join(save, "iteration")
iteration = int(open(checkpoint).read()) if os.path.exists(checkpoint) else 0
if iteration:
    ft.on_checkpoint_loaded(is_local_chkpt=False, global_state=state)
while iteration < 150:
    state.train_state.step = iteration
    ft.on_training_step_start(state)
    time.sleep(slow_s if iteration % 40 == 35 else 0.02)
    ft.on_training_step_end(state)
    iteration += 1
    if iteration % 30 == 0:
        ft.on_checkpointing_start(state)
        if RANK == 0:
            open(checkpoint, "w").write(str(iteration))
        ft.on_checkpointing_end(is_async_finalization=False, global_state=state)
ft.shutdown(state)
"""


def test_a_step_that_is_slow_every_time_ends_a_rank_once(launcher: Launcher, tmp_path: Path) -> None:
    options = ("--max-restarts=5", "--ft-calculated-timeout-floor=0.5", "--ft-max-no-progress-cycles=1")
    launched = launcher.start(LOOP, *options, script_args=[str(tmp_path / "save"), "0.8"])
    finished = launched.wait()
    assert finished.code == 0, finished.err
    verdicts = launched.events("verdict", role="monitor")
    assert [(verdict["section"], verdict["learned"]) for verdict in verdicts] == [("step", True)]
    assert "the timeout of 'step' has ended a rank in the last cycle: 2 times as long" in finished.out
    assert len(launched.events("cycle_ended")) == 2
