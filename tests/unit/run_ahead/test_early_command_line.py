"""The script on the command line, the environment of its imports, and what tells ranks apart."""

from __future__ import annotations

import sys

import pytest

from megatron_ft.config.config import OPTIONS
from megatron_ft.errors import ConfigError
from megatron_ft.launcher.base.rank_environment import find_script, why_fresh
from megatron_ft.link.base.rank_variables import shared_environment


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("none", None),
        ("a, b.c ,a", ("a", "b.c")),
    ],
)
def test_preload_option_is_parsed_into_module_names(text: str, names: tuple[str, ...] | None) -> None:
    assert OPTIONS["preload"].parse(text) == names
    with pytest.raises(ConfigError, match="must be names of modules"):
        OPTIONS["preload"].parse(f"{text},./train.py")


def test_shared_environment_has_what_all_ranks_have_in_common() -> None:
    ranks = [{"HOME": "/a", "RANK": str(rank), "FT_CYCLE": "0", "FT_OF_A_USER": "1"} for rank in range(3)]
    assert shared_environment(ranks) == {"HOME": "/a", "FT_OF_A_USER": "1"}
    assert shared_environment([*ranks, {"HOME": "/b", "RANK": "3"}]) is None


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["train.py"], ["train.py"]),
        (["train.py", "--ft-preload", "none", "-m"], ["train.py", "--ft-preload", "none", "-m"]),
        (["--nproc-per-node", "2", "-r3", "-t", "0:1", "--standalone", "train.py", "x"], ["train.py", "x"]),
        (["--nproc_per_node=2", "--ft-observe-only", "-m", "pkg.train", "--lr=1"], ["-m", "pkg.train", "--lr=1"]),
        (["--max-res", "3", "--ft-log-dir", "logs", "train.py"], ["train.py"]),
        (["--ft-preload=none", "train.py"], None),
        (["--no-python", "echo"], None),
        (["--run-path", "train.py"], None),
        (["--ft-reference-names=off", "train.py"], None),
        (["train_${local_rank}.py"], None),
        (["--nobody-knows-this", "train.py"], None),
    ],
)
def test_early_parse_finds_the_command_of_the_script(argv: list[str], command: list[str] | None) -> None:
    seen = find_script(argv, {})
    assert (None if seen is None else seen.command) == (None if command is None else [sys.executable, "-u", *command])


def test_environment_of_the_ranks_is_known_early() -> None:
    def threads(argv: list[str], environ: dict[str, str]) -> str | None:
        seen = find_script(argv, environ)
        assert seen is not None
        return seen.environment.get("OMP_NUM_THREADS")

    assert threads(["train.py"], {}) is None
    assert threads(["--nproc-per-node=2", "train.py"], {}) == "1"
    assert threads(["--nproc_per_node", "gpu", "train.py"], {}) == "1"
    assert threads(["train.py", "--nproc-per-node=2"], {}) is None
    assert threads(["--nproc-per-node=2", "train.py"], {"OMP_NUM_THREADS": "3"}) == "3"
    assert find_script(["train.py"], {"PET_NPROC_PER_NODE": "4"}) is None


def test_command_that_is_no_plain_script_needs_a_fresh_interpreter() -> None:
    python = sys.executable
    assert why_fresh([python, "-u", "train.py", "--lr", "1"]) is None
    assert why_fresh([python, "-u", "-m", "pkg.train"]) is None
    for argv in (["numactl", python, "-u", "t.py"], [python, "t.py"], [python, "-u", "-"], [python, "-u", "-c", "1"]):
        assert why_fresh(argv) is not None
