"""The job's secret: where it stands, and what is none."""

from __future__ import annotations

import os
from typing import Any

import pytest

from megatron_ft.errors import ConfigError
from megatron_ft.link.secret import memory_pickle_key, read_secret


def test_the_secret_is_not_short_and_may_be_in_a_file(tmp_path: Any) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    assert read_secret({"FT_SECRET_FILE": str(path)}) == b"0123456789abcdef"
    assert read_secret({"FT_SECRET": os.fsdecode(bytes(range(200, 232)))}) == bytes(range(200, 232))
    assert read_secret({}) is None
    assert read_secret({"FT_SECRET": "", "FT_SECRET_FILE": ""}) is None
    for environ in ({"FT_SECRET": "short"}, {"FT_SECRET_FILE": str(tmp_path / "missing")}):
        with pytest.raises(ConfigError):
            read_secret(environ)


@pytest.mark.parametrize("content", [b"", b"\n", b" " * 40, b"0123456789\x00bcdefgh", b"x" * 5000])
def test_a_secret_that_was_meant_and_is_not_there_lets_nobody_in(tmp_path: Any, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"FT_SECRET_FILE: .*secret has .*: 16 to 4096 "):
        read_secret({"FT_SECRET_FILE": str(path)})
    with pytest.raises(ConfigError, match=r"^FT_SECRET has 0 bytes"):
        read_secret({"FT_SECRET": "\n", "FT_SECRET_FILE": str(path)})


def test_pickle_key_is_the_same_in_all_lives_with_the_secret_and_new_without() -> None:
    assert memory_pickle_key(b"secret") == memory_pickle_key(b"secret") != memory_pickle_key(b"another")
    assert memory_pickle_key(None) != memory_pickle_key(None)
    assert b"secret".hex() not in memory_pickle_key(b"secret")
