"""A name server that is silent is asked again after a second; who sets RES_OPTIONS himself is heard."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, os, threading
from megatron_ft.link.resolver import ask_again_soon
ask_again_soon()
def show():
    state = ctypes.create_string_buffer(4096)
    ctypes.CDLL(None).__res_ninit(state)
    print(*ctypes.cast(state, ctypes.POINTER(ctypes.c_int * 2)).contents)
thread = threading.Thread(target=show)
thread.start()
thread.join()
print(os.environ.get("RES_OPTIONS"))
"""


@pytest.mark.parametrize(
    ("own", "seconds", "attempts"), [(None, 1, 5), ("timeout:3 attempts:4", 3, 4), ("attempts:1", None, 1)]
)
def test_resolver_options_apply_to_every_thread(own: str | None, seconds: int | None, attempts: int) -> None:
    env = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"}
    env |= {} if own is None else {"RES_OPTIONS": own}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
    numbers, options = done.stdout.splitlines()
    assert numbers.split()[1] == str(attempts)
    assert seconds is None or numbers.split()[0] == str(seconds)
    assert options == str(own)
