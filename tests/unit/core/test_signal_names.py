"""Signals in words."""

from __future__ import annotations

from megatron_ft.core.signal_names import signal_name


def test_a_signal_has_its_name_and_one_without_its_number() -> None:
    assert [signal_name(number) for number in (9, 15, 35, 200)] == ["SIGKILL", "SIGTERM", "signal 35", "signal 200"]
