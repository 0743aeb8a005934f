"""What a client enforces of calculated timeouts, and shows of those that its launcher has learned."""

from __future__ import annotations

from megatron_ft.learning.timeouts import HeartbeatTimeouts, SectionTimeouts, state_to_dict
from megatron_ft.link.base.layout import ArmedTimeout
from megatron_ft.rank.client.client import RankMonitorClient
from tests.support.boards import new_board
from tests.support.training import Bench, bench, clean_environment

__all__ = ["bench", "clean_environment"]  # fixtures

S = 1_000_000_000


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


def test_calculated_timeout_below_the_floor_is_enforced_at_the_floor(bench: Bench) -> None:
    bench.config.learned_floor = 5.0
    bench.config.rank_section_timeouts = {"setup": 60.0, "step": 60.0, "save": 60.0, "io": 0.2}
    bench.config.rank_out_of_section_timeout = 60.0
    sections = SectionTimeouts({"setup": 0.1, "step": 0.1, "save": 9.0}, 0.3, {"setup", "step", "save"}, True)
    for were_calculated, own_s in ((True, (5.0, 9.0)), (False, (3.0, 9.0))):
        client = RankMonitorClient()
        client.init_workload_monitoring()
        client.hb_timeouts = HeartbeatTimeouts(3.0, 9.0, were_calculated)
        client.load_state_dict(state_to_dict(None, sections))
        board = bench.seen()
        in_force = {section.name: (section.own_timeout_ns or 0) / 1e9 for section in board.sections}
        assert in_force == {"setup": 20.0, "step": 5.0, "save": 9.0, "io": 0.2}
        beats_ns = board.own_initial_heartbeat_timeout_ns, board.own_heartbeat_timeout_ns
        assert (board.own_out_of_section_timeout_ns, beats_ns) == (5 * S, (own_s[0] * S, own_s[1] * S))
        assert client.section_timeouts is not None
        assert client.section_timeouts.section["step"] == 0.1, "as calculated: the next one is averaged with it"
        client.shutdown_workload_monitoring()
