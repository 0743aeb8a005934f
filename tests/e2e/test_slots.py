"""Two copies of the suite share the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.slots import Slots

HOLDS = """
import sys
from pathlib import Path
from tests.support.slots import Slots
with Slots(Path(sys.argv[1]), 2).one():
    print("has one", flush=True)
    sys.stdin.read()
"""


def test_a_slot_is_free_again_when_the_process_that_had_it_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "slots"
    others = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDS, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        for _ in range(2)
    ]
    try:
        for other in others:
            assert other.stdout is not None
            assert other.stdout.readline() == b"has one\n"
        slots = Slots(path, 2)
        assert slots.take() is None
        others[1].kill()
        with slots.one():
            pass
    finally:
        for other in others:
            other.kill()
            other.communicate()
