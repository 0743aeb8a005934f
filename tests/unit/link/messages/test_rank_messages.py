"""What a rank tells its monitor passes the check."""

from __future__ import annotations

import pytest

from megatron_ft.errors import ProtocolError
from megatron_ft.link.messages.rank_messages import FROM_RANK
from tests.support.arrived import arrived


@pytest.mark.parametrize("state_path", ["x" * 4097, "a\0b", 7, None])
def test_a_hello_with_a_path_that_no_file_can_have_is_refused(state_path: object) -> None:
    said = {"type": "rank_hello", "cycle": 0, "rank": 0, "warmup_iterations": 0}
    for path in ("x" * 4096, "/a0\\\n\udcff"):
        assert FROM_RANK.parse(arrived({**said, "state_path": path})).state_path == path
    with pytest.raises(ProtocolError, match=r"hello: .* - at `[$].state_path`"):
        FROM_RANK.parse(arrived({**said, "state_path": state_path}))
