"""How long somebody hasn't answered."""

from __future__ import annotations

from megatron_ft.core.silence import Silence


def test_silence_grows_until_there_is_an_answer() -> None:
    silence = Silence(longest_look_s=2)
    assert [silence.look(0.0, now) for now in (5.0, 6.0, 7.5)] == [0, 1, 2.5]
    assert silence.look(8.0, 8.0) == 0
    assert silence.look(8.0, 9.0) == 1


def test_a_time_in_which_we_were_stopped_says_little() -> None:
    silence = Silence(longest_look_s=2)
    assert [silence.look(0.0, now) for now in (0.0, 1.0, 3600.0, 3601.0)] == [0, 1, 3, 4]
