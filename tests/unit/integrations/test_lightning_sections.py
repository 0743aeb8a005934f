"""``FaultToleranceSectionsCallback`` in real fits."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch", reason="the extra megatron_ft[lightning] isn't installed")

import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from megatron_ft.integrations.lightning_sections import Sections
from tests.support.lightning_fit import Do, FitBench, fits
from tests.support.lightning_job import Model
from tests.support.training import FakeClient, clean_environment

__all__ = ["clean_environment", "fits"]  # fixtures
# Lightning's own: advice for real trainings, and a deprecated call of torch
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]

VALIDATION = ["+step", "-step"] * 3
SAVE = ["+checkpointing", "-checkpointing"]
WRAPPED = ("save_checkpoint", "remove_checkpoint", "training_step", "validation_step", "run", "teardown")


def replaced_methods(trainer: Any) -> list[str]:
    loop = trainer.fit_loop.epoch_loop
    owners = [trainer, trainer.strategy, trainer.strategy.checkpoint_io, loop.automatic_optimization]
    return [name for owner in [*owners, loop.manual_optimization] for name in WRAPPED if name in vars(owner)]


def test_fit_opens_and_closes_its_sections_in_order(fits: FitBench) -> None:
    trainer = fits.fit(fits.sections(), max_steps=11)
    # "setup" ends with the sanity check's first batch; saves come after the hook, so they aren't in "step";
    # one of the top checkpoint, one of the last
    five_steps = ["+step", "-step"] * 5
    assert fits.transitions() == [
        *("+setup", "-setup", "+step", "-step", "+step", "-step"),
        *(five_steps + VALIDATION + five_steps),
        *(SAVE * 2 + VALIDATION + ["+step", "-step"]),
        *(SAVE * (fits.transitions().count("+checkpointing") - 2)),  # learned timeouts; the last checkpoint at the end
    ]
    assert fits.arguments_of("set_iteration") == list(range(11))
    assert fits.names()[0] == "init_workload_monitoring"
    assert fits.names()[-1] == "shutdown_workload_monitoring"
    assert replaced_methods(trainer) == []


def test_the_backward_pass_and_the_optimizer_are_in_step(fits: FitBench) -> None:
    seen: dict[str, list[str]] = {}
    hooks = ["on_after_backward", "on_before_optimizer_step", "on_train_batch_start", "on_train_batch_end"]
    watchers = [Do(hook, lambda _, hook=hook: seen.update({hook: fits.open_sections()})) for hook in hooks]
    fits.fit(fits.sections(), *watchers, max_steps=1)
    assert seen == {
        "on_after_backward": ["step"],
        "on_before_optimizer_step": ["step"],
        "on_train_batch_start": [],
        "on_train_batch_end": [],
    }


def test_backward_pass_of_a_manual_optimization_is_in_step(fits: FitBench) -> None:
    class Manual(Model):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()

    seen: list[str] = []
    fits.fit(
        fits.sections(),
        Do("on_after_backward", lambda _: seen.extend(fits.open_sections())),
        model=Manual(),
        max_steps=2,
    )
    assert seen == ["step"]
    assert fits.open_sections() == []


def test_the_other_ranks_wait_for_a_save_inside_checkpointing(fits: FitBench, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = fits.trainer(fits.sections(), max_steps=10)
    during = []
    monkeypatch.setattr(trainer.strategy, "barrier", lambda name=None: during.append((name, fits.open_sections())))
    trainer.fit(Model())
    assert ("Trainer.save_checkpoint", ["checkpointing"]) in during


@pytest.mark.parametrize(
    ("configured", "words"),
    [
        ({}, "not configured: checkpointing, setup, step"),
        ({"setup": 1.0, "step": 2.0, "checkpointing": None, "evaluation": 3.0}, "unknown: evaluation"),
    ],
)
def test_other_sections_are_a_mistake(fits: FitBench, configured: Any, words: str) -> None:
    fits.config.rank_section_timeouts = configured
    asked: list[Any] = []
    with pytest.raises(ValueError, match=f"setup, step, checkpointing .*{words}") as error:
        fits.fit(fits.sections(exc_handling_policy=asked.append))
    assert "\n" not in str(error.value)
    # a restart would meet the same mistake
    (request,) = fits.arguments_of("send_workload_control_request")
    assert request.action.name == "ShutdownWorkload"
    assert request.description == str(error.value)
    assert asked == []
    assert fits.names()[-1] == "shutdown_workload_monitoring"


@pytest.mark.parametrize("hook", ["on_after_backward", "on_save_checkpoint"])
def test_an_exception_closes_everything(fits: FitBench, hook: str) -> None:
    def fail(trainer: Any) -> None:
        raise ArithmeticError("x")

    callback = fits.sections()
    trainer = fits.trainer(callback, Do(hook, fail))
    with pytest.raises(ArithmeticError, match=r"^x$"):
        trainer.fit(Model())
    assert fits.open_sections() == []
    assert not callback.is_initialized
    assert fits.names()[-1] == "shutdown_workload_monitoring"
    assert replaced_methods(trainer) == []
    assert not fits.flag.exists()
    assert not fits.names("calculate_and_set_section_timeouts")
    # and the next fit is watched again
    fits.forget()
    fits.fit(callback, resume=False)
    assert fits.flag.exists()


def learned(fits: FitBench) -> dict[str, Any]:
    return json.loads((fits.save_dir / "_ft_state_.json").read_text())


def updates(fits: FitBench) -> list[tuple[list[str], bool]]:
    given = fits.arguments_of("calculate_and_set_section_timeouts")
    return [(each["selected_sections"], each["calc_out_of_section"]) for each in given]


def test_timeouts_learned_at_each_save_are_used_by_the_next_fit(
    fits: FitBench, caplog: pytest.LogCaptureFixture
) -> None:
    there: list[bool] = []
    file = fits.save_dir / "_ft_state_.json"
    looks = [Do("on_train_batch_start", lambda _: there.append(file.exists()), at=batch) for batch in (11, 12)]
    fits.fit(fits.sections(), *looks, max_steps=40)
    assert there == [False, True]  # who is killed later has learned something
    # once for each save, after the batch that follows it; at 40 together with the end; "step" from 16 on
    assert updates(fits) == [
        (["checkpointing"], False),
        *[(["step", "checkpointing"], False)] * 2,
        (["step", "checkpointing"], False),
    ]
    assert caplog.text.count("Updating FT timeouts") == caplog.text.count("Updated FT timeouts") == 4
    plain = learned(fits)["current_timeouts"]["section"]
    assert plain["calculated_sections"] == ["checkpointing", "step"]
    assert plain["is_out_of_section_calculated"] is False
    assert plain["section"]["step"] == learned(fits)["timeouts"]["step"]
    assert 0.0 < plain["section"]["step"] < 30.0  # what was configured

    fits.forget()
    in_force: list[Any] = []
    callback = fits.sections()
    watcher = Do("on_train_start", lambda _: in_force.append(callback.fault_tol_client.section_timeouts))
    fits.fit(callback, watcher, max_steps=58)
    assert in_force[0].section == {"setup": 60.0, **plain["section"]}
    assert in_force[0].calculated_sections == {"checkpointing", "step"}
    assert updates(fits) == [
        (["setup", "checkpointing"], False),
        (["setup", "step", "checkpointing"], True),
    ]
    assert set(learned(fits)["current_timeouts"]["section"]["calculated_sections"]) == {
        "setup",
        "step",
        "checkpointing",
    }
    assert learned(fits)["timeouts"]["out_of_section"] > 0.0
    assert learned(fits)["configured_s"]["setup"] == 60.0


def test_asynchronous_saves_are_not_learned(fits: FitBench) -> None:
    trainer = fits.trainer(fits.sections(), plugins=[AsyncCheckpointIO()])
    trainer.fit(Model())
    assert [names for names, _ in updates(fits)] == [["step"]]
    # the end of the writer is waited for inside the section, after the last step
    assert fits.transitions()[-2:] == SAVE
    assert replaced_methods(trainer) == []


def test_sigterm_runs_no_collective(fits: FitBench) -> None:
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    def terminate(trainer: Any) -> None:
        raise SIGTERMException

    asked: list[Any] = []
    with pytest.raises(SIGTERMException):
        fits.fit(fits.sections(exc_handling_policy=asked.append), Do("on_train_batch_end", terminate, at=19))
    assert updates(fits) == [(["checkpointing"], False)]  # after the save at 10
    assert asked == []
    assert fits.names()[-1] == "shutdown_workload_monitoring"


def test_learning_is_the_same_decision_in_every_step(fits: FitBench) -> None:
    """A save of one rank alone (an export, say) must not make that rank start a collective."""

    def export(trainer: Any) -> None:
        trainer.strategy.save_checkpoint({"weights": torch.zeros(1)}, str(fits.save_dir / "export.pt"))

    fits.fit(fits.sections(), Do("on_train_batch_end", export, at=0), max_steps=8, save_every=None)
    assert (fits.save_dir / "export.pt").exists()
    assert updates(fits) == []
    names = [each for each, _ in itertools.groupby(fits.transitions())]
    assert names.count("+checkpointing") == 8


def test_method_wrapped_again_by_others_keeps_their_wrapper() -> None:
    client, owner = FakeClient(), SimpleNamespace(work=lambda number: 2 * number)
    sections = Sections(client)
    sections.wrap(owner, "work", "step")
    ours = owner.work
    owner.work = lambda number: ours(number) + 1
    sections.end()
    assert owner.work(4) == 9
    assert client.calls == []
