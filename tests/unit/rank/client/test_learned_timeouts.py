"""What a client shows of timeouts that its launcher has learned, and its monitor has armed."""

from __future__ import annotations

from megatron_ft.learning.timeouts import SectionTimeouts
from megatron_ft.link.base.layout import ArmedTimeout
from megatron_ft.rank.client.client import RankMonitorClient
from tests.support.boards import new_board


def test_client_shows_enforced_armed_timeouts_as_calculated_and_others_as_configured() -> None:
    configured = {"step": 180.0, "save": 600.0}
    board = new_board(sections=configured)
    client = RankMonitorClient()
    client._board, client.section_timeouts = board, SectionTimeouts(configured)
    shown = board.snapshot()
    for enforced, step_s in ((False, 180.0), (True, 75.0)):
        armed = ArmedTimeout(75_000_000_000, enforced)
        step, save = shown.sections
        board.put_armed(shown._replace(sections=(step._replace(armed=armed), save)))
        assert client.section_timeouts is not None
        assert client.section_timeouts.section == {"step": step_s, "save": 600.0}
    assert client.state_dict()["current_timeouts"]["section"]["section"] == {"step": 75.0}
    client._disconnect()
    assert client.section_timeouts is not None
    assert client.section_timeouts.section["step"] == 75.0, "also after the end of the monitoring"
