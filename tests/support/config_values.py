"""Every valid set of values of the configuration, for property tests."""

from __future__ import annotations

import signal

from hypothesis import strategies as st

from megatron_ft.learning.timeouts import OUT_OF_SECTION
from megatron_ft.link.base.times import MAX_SECONDS

_seconds = st.floats(min_value=0, max_value=MAX_SECONDS, exclude_min=True)
_names = st.text(min_size=1, max_size=15).filter(
    lambda s: (
        s.isprintable() and s == s.strip() and s != OUT_OF_SECTION
    )  # hypothesis tries strings that the code compares
)
CONFIG_VALUES = st.fixed_dictionaries(
    {},
    optional={
        "initial_rank_heartbeat_timeout": st.none() | _seconds,
        "rank_heartbeat_timeout": st.none() | _seconds,
        "rank_section_timeouts": st.dictionaries(_names, st.none() | _seconds, max_size=5),
        "rank_out_of_section_timeout": st.none() | _seconds,
        "safety_factor": st.floats(min_value=0, exclude_min=True, allow_infinity=False),
        "learn": st.sampled_from(["report", "on", "reference", "off"]),
        "workload_check_interval": _seconds,
        "rank_termination_signal": st.sampled_from(list(signal.Signals)),
        "log_level": st.integers(10, 50),
    },
)
