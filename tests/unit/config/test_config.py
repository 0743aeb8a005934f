"""The configuration: what it accepts, what it refuses, and what it remembers about who set it."""

from __future__ import annotations

import copy
import json
import math
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from megatron_ft.config.config import FIELDS
from megatron_ft.config.files.yaml_file import FaultToleranceConfig
from megatron_ft.errors import ConfigError
from tests.support.config_values import CONFIG_VALUES

TIMEOUTS = ["initial_rank_heartbeat_timeout", "rank_heartbeat_timeout", "rank_out_of_section_timeout"]


def test_timeouts_alone_accept_none() -> None:
    cfg = FaultToleranceConfig()
    for name in TIMEOUTS:
        setattr(cfg, name, None)
        assert cfg.is_set(name)
    for name in set(FIELDS) - set(TIMEOUTS):
        with pytest.raises(ConfigError, match=name):
            setattr(cfg, name, None)


BAD = {
    "rank_heartbeat_timeout": [0, -0.5, math.nan, math.inf, True, "60", [], 10**400, 1e10, 1j],
    "safety_factor": [0, -1, math.nan, math.inf, "5", False],
    "rank_termination_signal": ["SIGTREM", "SIG_IGN", "", 0, -9, 4711, True, 9.0, "Signals"],
    "log_level": ["LOUD", "", 0, 51, -10, True, 20.0, None],
}


@pytest.mark.parametrize(("name", "bad"), [(name, bad) for name, values in BAD.items() for bad in values])
def test_bad_value_is_refused_with_the_name_of_its_option(name: str, bad: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        FaultToleranceConfig(**{name: bad})
    assert "\n" not in str(caught.value)
    cfg = FaultToleranceConfig()
    with pytest.raises(ValueError, match=name):
        setattr(cfg, name, bad)
    assert cfg == FaultToleranceConfig()


READ = {
    "learn": [(True, "on"), (False, "off"), ("report", "report"), ("reference", "on")],
    "rank_termination_signal": [
        (given, signal.SIGTERM) for given in ("SIGTERM", "sigterm", "TERM", " SIGTERM ", 15, signal.SIGTERM)
    ],
    "log_level": [("DEBUG", 10), ("info", 20), ("warn", 30), ("WARNING", 30), ("Error", 40), ("FATAL", 50), (15, 15)],
}


@pytest.mark.parametrize(("name", "given", "stored"), [(name, *pair) for name, pairs in READ.items() for pair in pairs])
def test_names_numbers_and_booleans_of_yaml_are_stored_as_the_options_value(name: str, given: Any, stored: Any) -> None:
    value = getattr(FaultToleranceConfig(**{name: given}), name)
    assert (type(value), value) == (type(stored), stored)


@pytest.mark.parametrize("bad", ["", " step", "a\nb", "x" * 64, "ä" * 32, 1, None, True, "\ud800"])
def test_bad_section_name_is_refused_in_one_line(bad: Any) -> None:
    with pytest.raises(ConfigError, match="section name") as caught:
        FaultToleranceConfig(rank_section_timeouts={bad: 1})
    assert "\n" not in str(caught.value)


def test_changes_in_place_are_validated_and_change_nothing_if_refused() -> None:
    cfg = FaultToleranceConfig(rank_section_timeouts={"step": 1})
    timeouts: Any = cfg.rank_section_timeouts
    for change in (
        lambda: timeouts.__setitem__("step", -1),
        lambda: timeouts.update(setup=2, step="x"),
        lambda: timeouts.__ior__({"setup": math.nan}),
    ):
        with pytest.raises(ConfigError):
            change()
        assert timeouts == {"step": 1.0}
    timeouts |= {"setup": 5}
    timeouts.setdefault("save")
    assert cfg.rank_section_timeouts == {"step": 1.0, "setup": 5.0, "save": None}


def test_options_that_only_the_reference_knows_are_ignored_with_one_warning() -> None:
    given: dict[str, Any] = {"enable_nic_monitor": False, "pci_topo_file": "x", "safety_factor": 2}
    names = r"ignored: enable_nic_monitor, pci_topo_file \(.*links"
    for construct in (
        FaultToleranceConfig,
        FaultToleranceConfig.from_kwargs,
        lambda **values: FaultToleranceConfig.from_kwargs(ignore_not_recognized=False, **values),
    ):
        with pytest.warns(UserWarning, match=names) as told:
            cfg: Any = construct(**given)
        assert len(told) == 1
        assert cfg.to_dict() == {"safety_factor": 2.0}
        assert (cfg.enable_nic_monitor, cfg.pci_topo_file) == (False, "x")  # a program may read them back
    with pytest.warns(UserWarning, match="enable_nic_monitor "):
        cfg.enable_nic_monitor = True
    assert (cfg.enable_nic_monitor, cfg.to_dict()) == (True, {"safety_factor": 2.0})


def test_monitor_gets_no_option_of_the_launcher() -> None:
    config = FaultToleranceConfig(safety_factor=2, on_event="curl -H 'token: 1'", max_no_progress_cycles=5)
    assert config.for_ranks() == {"safety_factor": 2.0}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=CONFIG_VALUES)
def test_every_way_of_copying_keeps_values_and_what_was_set(tmp_path: Path, values: dict[str, Any]) -> None:
    cfg = FaultToleranceConfig(**values)
    cfg.to_yaml_file(tmp_path / "ft.yaml")
    for other in (
        cfg.copy(),
        copy.copy(cfg),
        copy.deepcopy(cfg),
        pickle.loads(pickle.dumps(cfg)),
        FaultToleranceConfig.from_dict(json.loads(json.dumps(cfg.to_dict()))),
        FaultToleranceConfig.from_kwargs(**values),
        FaultToleranceConfig.from_yaml_file(tmp_path / "ft.yaml", ignore_not_recognized=False),
    ):
        assert type(other) is FaultToleranceConfig
        assert other == cfg
        assert other.to_dict().keys() == cfg.to_dict().keys() == set(values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("setup:abc", r"rank_section_timeouts\['setup'\] = 'abc'"),
        ("setup", "NAME:SECONDS"),
        ("setup:1,setup:2", "twice"),
        ("{setup: 1}", "rank_section_timeouts"),
    ],
)
def test_text_that_is_no_section_timeouts_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        FIELDS["rank_section_timeouts"].parse(text)
    assert "\n" not in str(caught.value)
