"""Random numbers of a script that is run ahead: what it seeds stays, what nobody seeds differs from rank to rank."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

_WITHOUT_STOP = """
import json, random, sys
from megatron_ft.rank.run_ahead.randomness import Randomness
from megatron_ft.rank.base.replacing import Replacements

stops = []
replacements = Replacements()
randomness = Randomness(replacements, stops.append, lambda what: None)
import numpy{torch}
{act}
replacements.undo()
spoiled = randomness.why_spoiled()
randomness.freshen()
print(json.dumps([len(stops), spoiled is not None, {look}]))
"""
_SEEDED = "random.seed(1); numpy.random.seed(1);"
_NUMBERS = "random.random(), numpy.random.rand()"


def run(act: str, look: str = "0") -> list[object]:
    """How often it must have stopped, whether no rank may be forked after it, and what is left."""
    command = [sys.executable, "-c", _WITHOUT_STOP.format(act=act, look=look, torch=", torch" * ("torch" in act))]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)
    return [*found[:2], found[2:]]


def test_generator_seeded_by_the_script_keeps_its_sequence() -> None:
    assert run(_SEEDED, _NUMBERS) == run(_SEEDED, _NUMBERS)


@pytest.mark.parametrize(
    ("act", "state"),
    [
        ("random.seed(None)", "random.getstate()"),  # as in seed=config.seed, and there is none
        ("random.seed(1); random.random(); random.seed()", "random.getstate()"),
        ("numpy.random.seed(seed=1); numpy.random.seed(seed=None)", "repr(numpy.random.get_state())"),
        ("made = random.Random()", "made.getstate()"),  # as a library does for itself
    ],
)
def test_generator_seeded_by_the_system_is_seeded_anew(act: str, state: str) -> None:
    assert run(act)[:2] == [0, False]
    assert run(f"{act}; inherited = {state}", f"{state} == inherited")[2] == [False]


@pytest.mark.parametrize("made", ["random.Random(5)", "random.Random(); made.seed(5)"])
def test_a_generator_that_a_library_has_seeded_stays(made: str) -> None:
    assert run(f"made = {made}", "made.random()") == run(f"made = {made}", "made.random()")


@pytest.mark.parametrize(
    "act",
    [
        "random.setstate(random.getstate())",
        "numpy.random.set_state(numpy.random.get_state())",
        "with torch.random.fork_rng(): torch.manual_seed(0)",
        "torch.initial_seed(); torch.random.seed()",
    ],
)
def test_read_of_an_unseeded_state_counts_as_a_draw(act: str) -> None:
    assert run(act)[0]
    if "torch" not in act:
        assert run(f"{_SEEDED} {act}")[0] == 0


@pytest.mark.parametrize("act", ["numpy.random.mtrand._rand.rand()", "random._inst.random()"])
def test_draw_from_an_unseeded_private_generator_spoils_a_fork(act: str) -> None:
    assert run(act)[1] is True
    assert run(f"{_SEEDED} {act}")[1] is False
