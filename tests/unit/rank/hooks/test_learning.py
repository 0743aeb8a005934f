"""Which timeouts a run learns, and what the next run makes of them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft import fault_tolerance as ft
from megatron_ft.core.board import layout as layout
from megatron_ft.core.board.layout import timeout_word
from megatron_ft.core.config.config import MAX_SECTIONS
from megatron_ft.core.errors import RankMonitorClientError
from megatron_ft.core.timeouts.in_force import SectionTimeouts
from megatron_ft.rank.client.client import RankMonitorClient
from megatron_ft.rank.hooks import learning
from tests.support.training import (
    ALL,
    Bench,
    FakeClient,
    bench,
    clean_environment,
    client,
    evaluate,
    learning_run,
    save_checkpoint,
    start,
    train,
)

__all__ = ["bench", "clean_environment", "client"]  # fixtures


def test_nothing_is_learned_unless_asked_for(tmp_path: Path, client: FakeClient) -> None:
    state = start(tmp_path)
    ft.on_checkpoint_loaded(False, state)
    train(state, 20)
    save_checkpoint(state)
    ft.shutdown(state)
    assert client.calculations() == []
    assert not (tmp_path / "ckpt" / "ft_state.json").exists()


def test_where_no_timeout_is_configured_a_step_is_learned_after_some_minutes(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    state = start(bench.tmp_path)
    train(state, 31)
    assert bench.in_force(state)["step"] is None
    train(state, 1)
    learned = bench.in_force(state)["step"]
    assert learned is not None
    assert bench.state_file.exists()
    ft.shutdown(state)
    assert capfd.readouterr().out.count("no timeout is configured: they are learned from this run") == 1
    state = start(bench.tmp_path)
    assert bench.in_force(state)["step"] is not None
    train(state, 3)
    ft.shutdown(state)
    assert "no timeout is configured" not in capfd.readouterr().out


@pytest.mark.parametrize("setting", [("learn_timeouts", "off"), ("rank_out_of_section_timeout", 60.0)])
def test_it_is_not_where_that_is_turned_off_or_any_timeout_is_configured(
    setting: tuple[str, object], bench: Bench
) -> None:
    setattr(bench.config, *setting)
    state = start(bench.tmp_path)
    train(state, 40)
    save_checkpoint(state)
    assert bench.in_force(state)["step"] is None
    ft.shutdown(state)
    assert not bench.state_file.exists()


def test_timeouts_are_learned_after_each_save_and_at_the_end(tmp_path: Path, client: FakeClient) -> None:
    state = learning_run(tmp_path, client, saves=2)
    sections = ["setup", "step", "checkpointing"]
    assert client.calculations() == [(sections, False), (sections, False)]
    ft.shutdown(state)
    assert client.calculations()[2:] == [(sections, True)]


@pytest.mark.parametrize("loaded", [None, False])
def test_setup_is_learned_only_with_a_persistent_checkpoint(
    loaded: bool | None, tmp_path: Path, client: FakeClient
) -> None:
    state = learning_run(tmp_path, client, loaded=loaded)
    ft.shutdown(state)
    assert client.calculations() == [(["step", "checkpointing"], False)] * 2


def test_step_is_learned_only_after_16_training_iterations(tmp_path: Path, client: FakeClient) -> None:
    state = learning_run(tmp_path, client, steps=15)
    evaluate(state, 10)
    save_checkpoint(state)
    assert client.calculations()[-1] == (["setup", "checkpointing"], False)
    train(state, 1)
    save_checkpoint(state)
    assert client.calculations()[-1] == (["setup", "step", "checkpointing"], False)


def test_checkpointing_is_learned_only_after_a_save(tmp_path: Path, client: FakeClient) -> None:
    state = learning_run(tmp_path, client, saves=0)
    ft.shutdown(state)
    assert client.calculations() == [(["setup", "step"], False)]


def test_checkpointing_is_never_learned_with_async_saves(tmp_path: Path, client: FakeClient) -> None:
    state = learning_run(tmp_path, client, async_save=True)
    ft.shutdown(state)
    assert client.calculations() == [(["setup", "step"], False), (["setup", "step"], True)]


def test_nothing_to_learn_means_no_collective(tmp_path: Path, client: FakeClient) -> None:
    state = learning_run(tmp_path, client, loaded=None, steps=3, saves=0)
    ft.shutdown(state)
    assert client.calculations() == []


def test_reasons_are_said_once(tmp_path: Path, client: FakeClient, capfd: pytest.CaptureFixture[str]) -> None:
    state = learning_run(tmp_path, client, loaded=None, saves=3)
    ft.shutdown(state)
    out = capfd.readouterr().out
    assert out.count("'setup' is learned in a run that loads") == 1
    assert out.count("out-of-section timeout isn't learned") == 1


def test_other_ranks_say_nothing_and_write_nothing(
    tmp_path: Path,
    client: FakeClient,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", "3")
    (tmp_path / "ckpt").mkdir()
    state = learning_run(tmp_path, client)
    ft.shutdown(state)
    assert client.calculations()
    assert list((tmp_path / "ckpt").iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_a_calculation_that_isnt_ready_is_a_warning(
    tmp_path: Path, client: FakeClient, capfd: pytest.CaptureFixture[str]
) -> None:
    state = start(tmp_path, calc_ft_timeouts=True)
    client.calculation_error = RankMonitorClientError("no rank has observed ['step'] yet")
    train(state, 20)
    save_checkpoint(state)
    save_checkpoint(state)
    assert capfd.readouterr().err.count("timeouts were not updated: no rank has observed ['step'] yet") == 1
    assert not (tmp_path / "ckpt" / "ft_state.json").exists()


def test_a_state_file_that_cant_be_written_is_one_warning(
    tmp_path: Path,
    client: FakeClient,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    state = learning_run(tmp_path, client, saves=3)
    ft.shutdown(state)
    assert capfd.readouterr().err.count("No space left on device") == 1
    assert list((tmp_path / "ckpt").iterdir()) == []


def test_a_client_that_isnt_ours_keeps_its_own_state(tmp_path: Path, client: FakeClient) -> None:
    state = learning_run(tmp_path, client)
    path = tmp_path / "ckpt" / "ft_state.json"
    assert json.loads(path.read_text()) == client.state
    ft.shutdown(state)
    ft.setup(state.cfg, state)
    assert client.loaded == client.state


def test_missing_sections_are_added_and_said_once(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    bench.config.rank_section_timeouts = {"step": 30.0}
    state = bench.start()
    assert bench.in_force(state) == {"step": 30.0, "setup": None, "checkpointing": None, "out_of_section": None}
    out = capfd.readouterr().out
    assert out.count("no timeout is configured for 'setup', 'checkpointing'") == 1
    train(state, 3)
    ft.shutdown(state)


def test_missing_sections_find_their_place_beside_as_many_as_may_be_configured(bench: Bench) -> None:
    bench.config.rank_section_timeouts = {f"mine-{n}": 60.0 for n in range(MAX_SECTIONS)}
    state = bench.start()
    assert state.rank_monitor_client.section_timeouts.section.keys() >= ALL - {"out_of_section"}
    train(state, 2)
    ft.shutdown(state)


def test_learned_timeouts_are_kept_and_used_by_the_next_run(bench: Bench) -> None:
    bench.learn()
    document = json.loads(bench.state_file.read_text())
    assert set(document["sections"]) == ALL - {"out_of_section"}
    assert document["schema_version"] == 2
    assert document["world_size"] == 1
    assert document["written_at_unix_s"] == pytest.approx(time.time(), abs=60.0)
    step = document["sections"]["step"]
    assert step["timeout_s"] == 5.0
    assert step["rank_of_max"] == 0
    assert 0.0 < step["max_observed_s"] < 0.1
    state = bench.start()
    assert bench.in_force(state) == dict.fromkeys(ALL, 5.0)
    words = state.rank_monitor_client._board.words
    assert words[layout.W_OUT_OF_SECTION_TIMEOUT] == timeout_word(5.0)
    (event,) = bench.events("state_loaded")
    assert event["timeouts"] == dict.fromkeys(ALL, 5.0)
    assert len(bench.events("timeouts_learned", 2)) == 2
    ft.shutdown(state)


def test_every_learned_timeout_is_logged_with_its_margin(bench: Bench) -> None:
    bench.config.rank_section_timeouts = {"step": 30.0}
    bench.learn()
    logged = bench.events("timeouts_learned", 2)
    step = logged[0]["timeouts"]["step"]
    assert step.keys() == {
        *("timeout_s", "previous_s", "max_observed_s", "margin_s", "rank_of_max"),
        *("rule", "reference_s", "budget_s", "first_s", "suspect_s"),
    }
    assert step["rule"] == "budget"
    assert (step["previous_s"], step["timeout_s"], step["rank_of_max"]) == (30.0, 5.0, 0)
    assert step["margin_s"] == pytest.approx(5.0 - step["max_observed_s"])
    assert {name for event in logged for name in event["timeouts"]} == ALL


def test_another_size_or_layout_is_said(
    bench: Bench, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"tensor_model": 2, "pipeline_model": 1, "context": 1, "expert_model": 1, "data": 4}
    functions = {f"get_{name}_parallel_world_size": lambda size=size: size for name, size in sizes.items()}
    groups = SimpleNamespace(**functions, model_parallel_is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", groups)
    bench.learn()
    document = json.loads(bench.state_file.read_text())
    assert document["layout"] == {"tensor": 2, "pipeline": 1, "context": 1, "expert": 1, "data": 4}
    capfd.readouterr()
    ft.shutdown(bench.start())
    assert "learned with" not in capfd.readouterr().err

    groups.get_tensor_model_parallel_world_size = lambda: 4
    monkeypatch.setenv("WORLD_SIZE", "16")
    state = bench.start()
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "learned with" in line]
    assert (
        "with 1 rank (tensor 2, pipeline 1, context 1, expert 1, data 4), and this run has 16 ranks (tensor 4" in line
    )
    assert bench.in_force(state) == dict.fromkeys(ALL, 5.0)  # they are used all the same
    assert bench.events("state_loaded", 2)[-1]["layout"]["tensor"] == 2
    ft.shutdown(state)


@pytest.mark.parametrize("groups", [SimpleNamespace(), SimpleNamespace(model_parallel_is_initialized=lambda: False)])
def test_a_megatron_without_groups_has_no_layout(monkeypatch: pytest.MonkeyPatch, groups: SimpleNamespace) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", groups)
    assert learning.current_layout() is None


def test_learned_timeouts_have_the_configured_floor(bench: Bench) -> None:
    bench.config.calculated_timeout_floor = 7.5
    bench.learn()
    document = json.loads(bench.state_file.read_text())
    assert {entry["timeout_s"] for entry in document["sections"].values()} == {7.5}
    assert document["out_of_section"]["timeout_s"] == 7.5


def test_the_file_serves_nvidia_resiliency_ext_too(bench: Bench) -> None:
    """Its client hands the file's mappings to its own two classes, and takes the sections for all that there are."""
    bench.config.rank_section_timeouts = {"step": 30.0, "mine": 60.0}
    state = bench.start()
    train(state, 20)
    bench_client = state.rank_monitor_client
    ft.shutdown(state)
    section = json.loads(bench.state_file.read_text())["current_timeouts"]["section"]
    assert SectionTimeouts(**section) == bench_client.section_timeouts
    assert section["section"] == {"step": 5.0, "mine": 60.0, "setup": None, "checkpointing": None}
    assert section["calculated_sections"] == ["step"]


def test_a_state_below_the_floor_is_enforced_at_the_floor(bench: Bench) -> None:
    """Also one of the client's own: hooks of others calculate and load by its methods, without this module."""
    bench.config.rank_section_timeouts = {"step": None}
    client = RankMonitorClient()
    client.init_workload_monitoring()
    with client.section("step"):
        pass
    client.calculate_and_set_section_timeouts()
    client.send_heartbeat()
    client.send_heartbeat()
    client.calculate_and_set_hb_timeouts()
    assert client.section_timeouts is not None
    assert 0.0 < client.section_timeouts.section["step"] < 5.0  # type: ignore[operator]

    def enforced(client: RankMonitorClient) -> set[int | None]:
        assert client._board is not None
        board = client._board.snapshot()
        return {
            *(section.timeout_ns for section in board.sections),
            *(board.out_of_section_timeout_ns, board.initial_heartbeat_timeout_ns, board.heartbeat_timeout_ns),
        }

    assert enforced(client) == {5_000_000_000}
    state = client.state_dict()
    client.shutdown_workload_monitoring()
    client.load_state_dict(state)
    client.init_workload_monitoring()
    assert enforced(client) == {5_000_000_000}
    client.shutdown_workload_monitoring()


def test_a_configured_value_that_was_changed_wins_and_says_so(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    bench.config.rank_section_timeouts = {"step": 30.0, "setup": 60.0}
    bench.learn()
    bench.config.rank_section_timeouts = {"step": 40.0, "setup": 60.0}
    capfd.readouterr()
    state = bench.start()
    assert bench.in_force(state) == {"step": 40.0, "setup": 5.0, "checkpointing": 5.0, "out_of_section": 5.0}
    assert capfd.readouterr().err.count("'step' keeps its configured timeout of 40 s") == 1
    ft.shutdown(state)


def test_changes_are_said_with_their_origin_and_nothing_is_said_without_one(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    bench.config.rank_section_timeouts = {"step": 30.0}
    state = bench.start()
    train(state, 20)
    save_checkpoint(state)
    save_checkpoint(state)
    ft.shutdown(state)
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "timeouts updated" in line]
    assert "step 5 s (was 30 s; the longest took " in line
    assert ", in rank 0); checkpointing 5 s (was infinity; " in line


def test_the_last_write_isnt_watched(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    state = bench.start()
    client = state.rank_monitor_client
    watched: list[bool] = []
    write = learning.write_state

    def traced(path: str, document: Any) -> None:
        watched.append(client.is_initialized)
        write(path, document)

    monkeypatch.setattr(learning, "write_state", traced)
    train(state, 20)
    save_checkpoint(state)
    ft.shutdown(state)
    assert watched == [True, False]


def test_what_a_run_doesnt_learn_again_is_kept_with_its_origin(bench: Bench) -> None:
    bench.learn()
    first = json.loads(bench.state_file.read_text())
    state = bench.start()
    train(state, 20)
    ft.shutdown(state)  # "step" only: nothing loaded, no save
    second = json.loads(bench.state_file.read_text())
    assert second["sections"]["setup"] == first["sections"]["setup"]
    assert second["out_of_section"] == first["out_of_section"]
    assert second["sections"]["step"]["previous_s"] == 5.0


def test_a_state_of_megatrons_own_integration_is_loaded(bench: Bench) -> None:
    bench.state_file.parent.mkdir()
    section = {
        "section": {"setup": 600.0, "step": 9.0, "checkpointing": None},
        "out_of_section": 33.0,
        "calculated_sections": ["step"],
        "is_out_of_section_calculated": True,
    }
    bench.state_file.write_text(json.dumps({"current_timeouts": {"section": section}}))
    state = bench.start()
    assert bench.in_force(state) == {"setup": None, "step": 9.0, "checkpointing": None, "out_of_section": 33.0}
    ft.shutdown(state)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "   \n",
        '{"schema": "megatron_ft.ft_state", "schema_ver',
        "null",
        "[]",
        "3",
        '"text"',
        '{"something": 1}',
        "\x00\x00\x00\x00",
        "[" * 100_000,
        '{"schema": "megatron_ft.ft_state", "schema_version": 99, "sections": {}}',
        '{"schema": "another", "schema_version": 1, "sections": {}}',
        '{"current_timeouts": {"section": {"section": {"step": -3}, "calculated_sections": ["step"]}}}',
        '{"current_timeouts": 5}',
    ],
)
def test_a_broken_file_is_set_aside_and_training_goes_on(
    content: str, bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    bench.state_file.parent.mkdir()
    bench.state_file.write_text(content)
    state = bench.start()
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "ft_state.json.corrupt-1" in err
    assert not bench.state_file.exists()
    assert bench.state_file.with_name("ft_state.json.corrupt-1").read_text() == content
    assert bench.in_force(state) == dict.fromkeys(ALL, None)
    train(state, 2)
    ft.shutdown(state)


@pytest.mark.parametrize("value", ["-1", "0", "NaN", "Infinity", '"5"', "true", "null", "[]", "1" + "0" * 400])
@pytest.mark.parametrize("key", ["timeout_s", "max_observed_s", "out"])
def test_values_that_cant_be_right_make_a_file_broken(
    key: str, value: str, bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    bench.learn()
    document = json.loads(bench.state_file.read_text())
    entry = document["out_of_section"] if key == "out" else document["sections"]["step"]
    entry["timeout_s" if key == "out" else key] = "PLACE"
    bench.state_file.write_text(json.dumps(document).replace('"PLACE"', value))
    capfd.readouterr()
    is_fine = key == "max_observed_s" and value in ("0", "null")
    state = bench.start()
    assert ("corrupt-1" in capfd.readouterr().err) is not is_fine
    assert bench.in_force(state)["step"] == (5.0 if is_fine else None)
    ft.shutdown(state)


def test_what_was_seen_is_kept_and_the_next_run_goes_on_from_it(bench: Bench) -> None:
    bench.learn()
    document = json.loads(bench.state_file.read_text())
    assert set(document["seen"]) == ALL
    assert document["seen"]["step"]["updates"] == 2
    assert sum(document["seen"]["step"]["counts"].values()) == pytest.approx(20 - 1 - 4, rel=0.01)
    bench.learn()
    later = json.loads(bench.state_file.read_text())
    assert later["seen"]["step"]["updates"] == 4
    assert sum(later["seen"]["step"]["counts"].values()) == pytest.approx(2 * (20 - 1 - 4), rel=0.01)


def test_the_reference_rule_can_be_chosen(bench: Bench) -> None:
    bench.config.timeout_rule = "reference"
    bench.learn()
    document = json.loads(bench.state_file.read_text())
    assert document["seen"] == {}
    assert bench.events("timeouts_learned")[0]["timeouts"]["step"]["rule"] == "reference"


def test_the_first_steps_have_a_timeout_of_their_own_on_the_board(bench: Bench) -> None:
    bench.config.calculated_timeout_floor = 0.0
    state = bench.start()
    recorder = state.rank_monitor_client._recorder
    train(state, 20)
    recorder.seen["step"].first_ns = 5_000_000_000
    save_checkpoint(state)
    board = state.rank_monitor_client._board.snapshot()
    (step,) = [section for section in board.sections if section.name == "step"]
    assert step.is_learned
    assert step.first_timeout_ns == 25_000_000_000
    assert step.timeout_ns is not None
    assert step.timeout_ns < 25_000_000_000
    ft.shutdown(state)
    state = bench.start()  # the next run has it from the file
    (step,) = [s for s in state.rank_monitor_client._board.snapshot().sections if s.name == "step"]
    assert step.first_timeout_ns == 25_000_000_000
    ft.shutdown(state)


def test_the_moment_from_which_a_step_is_suspected_is_on_the_board_too(bench: Bench) -> None:
    bench.config.calculated_timeout_floor = 0.0

    def suspect_after_s(state: ft.GlobalState) -> float | None:
        board = state.rank_monitor_client._board.snapshot()
        (step,) = [section for section in board.sections if section.name == "step"]
        assert step.suspect_after_ns is None or step.suspect_after_ns < (step.timeout_ns or 0)
        return None if step.suspect_after_ns is None else step.suspect_after_ns / 1e9

    state = bench.start()
    train(state, 20)
    assert suspect_after_s(state) is None
    sample = state.rank_monitor_client._recorder.seen["step"]
    for _ in range(2):
        sample.note(4_000_000_000)
    save_checkpoint(state)
    learned_s = suspect_after_s(state)
    assert learned_s is not None
    assert 4.0 < learned_s < 20.0
    ft.shutdown(state)  # which learns once more
    kept_s = json.loads(bench.state_file.read_text())["sections"]["step"]["suspect_after_s"]
    state = bench.start()  # the next run has it from the file
    assert suspect_after_s(state) == pytest.approx(kept_s)
    ft.shutdown(state)


def test_so_has_the_time_out_of_section_before_them_in_the_next_run(bench: Bench) -> None:
    bench.config.calculated_timeout_floor = 0.0
    state = bench.start()
    ft.on_checkpoint_loaded(is_local_chkpt=False, global_state=state)
    train(state, 20)
    save_checkpoint(state)
    state.rank_monitor_client._recorder.seen["out_of_section"].first_ns = 5_000_000_000  # the first step compiles
    ft.shutdown(state)
    board = bench.start().rank_monitor_client._board.snapshot()
    assert board.is_out_of_section_learned
    assert board.first_out_of_section_ns == 25_000_000_000
    assert board.out_of_section_timeout_ns is not None
    assert board.out_of_section_timeout_ns < 25_000_000_000
