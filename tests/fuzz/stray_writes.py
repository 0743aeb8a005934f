"""A real rank that writes garbage over its own board, while its real monitor watches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.fuzz.watched import figures, watched

__all__ = ["attack_board"]

_MOST_WARNINGS = 40
_SCRIPT = """
import random
rng = random.Random({seed})
client.init_workload_monitoring()
words = client._board.words
client.start_section('outer')
say('ready')
for number in range({writes}):
    client.set_iteration(number)
    with client.section('step'):
        first = rng.randrange(rng.choice((32, 80, len(words))))
        count = min(rng.choice((2, 5, 100, len(words))), len(words) - first)
        kind = rng.randrange(3)
        data = rng.randbytes(8 * count) if kind == 0 else (b'\\0', b'\\xff')[kind - 1] * 8 * count
        words[first : first + count] = memoryview(data).cast('Q')
        client._wake_monitor()
        time.sleep(rng.choice((0.0, 0.002, 0.01)))
say('healed?')
for _ in range(20):
    time.sleep(0.02)
    with client.section('step'):
        client._wake_monitor()
say('hanging')
client.start_section('step')
while True: signal.pause()
"""


def attack_board(
    directory: Path, seed: int, say: Callable[[str], None], *, writes: int, timeout_s: float = 5.0
) -> None:
    """Never ended for garbage alone, never unwatched without a word, and its hang in the end is found.

    Raises:
        AssertionError: it wasn't so.
    """
    sections = {"step": timeout_s, "outer": 3600.0}
    script = _SCRIPT.format(seed=seed, writes=writes)
    with watched(directory, script, timeout_s=timeout_s, sections=sections) as both:
        assert both.rank.stdout is not None
        lines = []
        for line in both.rank.stdout:
            lines.append(line.strip())
            if lines[-1] == "hanging":
                break
        assert lines == ["ready", "healed?", "hanging"], (lines, both.said("verdict"))
        # a verdict before it hung would be on garbage alone
        verdict = both.wait_for("verdict")
        assert (verdict["kind"], verdict["section"]) == ("section", "step"), verdict
        assert verdict["elapsed_s"] < timeout_s + 60, verdict
        both.rank.wait(60)
        warnings = [message["text"] for message in both.said("warning")]
        assert any("was damaged" in text for text in warnings), warnings
        assert len(warnings) < _MOST_WARNINGS, len(warnings)
        assert all(len(text) < 600 for text in warnings)
        assert both.monitor.poll() is None
        after = figures(both.monitor.pid, both.log_dir)
        say(f"{writes} stray writes: {len(warnings)} warnings, the hang was found; the monitor then: {after}")
