"""`RankMonitorClient` in a script that wasn't started with ``ft_launcher``: one warning, and calls that do nothing."""

from __future__ import annotations

import pytest

from megatron_ft.errors import RankMonitorClientError
from megatron_ft.link.base.control import WorkloadAction, WorkloadControlRequest
from megatron_ft.rank.base import say
from megatron_ft.rank.client.client import RankMonitorClient


@pytest.fixture
def _without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FT_RANK_MONITOR_IPC_SOCKET", "FT_LAUNCHER_IPC_SOCKET", "FT_REQUIRE_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    say.forget()


@pytest.mark.usefixtures("_without_launcher")
def test_every_call_does_nothing_after_one_warning(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        client = RankMonitorClient()
        client.init_workload_monitoring()
        assert client.is_initialized
        client.set_iteration(3)
        client.send_heartbeat()
        with client.section("step"):
            pass
        client.start_section("step")
        client.start_section("step")
        client.end_section("other")
        client.end_all_sections()
        assert client.calculate_and_set_hb_timeouts() is False
        assert client.calculate_and_set_section_timeouts(["step"]) is False
        client.load_state_dict(client.state_dict())
        client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ExcludeThisNode, "bad"))
        client.shutdown_workload_monitoring()
        assert not client.is_initialized
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("FT: WARNING: not started with ft_launcher: fault tolerance is off")


@pytest.mark.usefixtures("_without_launcher")
def test_call_before_initialisation_is_still_an_error() -> None:
    for use in (RankMonitorClient().send_heartbeat, lambda: RankMonitorClient().start_section("step")):
        with pytest.raises(RankMonitorClientError, match="not initialized"):
            use()
