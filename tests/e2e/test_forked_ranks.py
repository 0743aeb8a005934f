"""A rank that is forked from its script, run ahead, ends and runs modules as one that is a fresh interpreter."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import END_IS_TOO_LATE, ROOT, Launched, Launcher, clean_environment

SUPPORT = ROOT / "tests" / "support"


def was_forked(launched: Launched) -> bool:
    states = [event["state"] for event in launched.events("fork_server")]
    return "ready" in states and not {"fork failed", "given up"} & {*states}


def normal(text: str, directory: Path) -> list[str]:
    """Lines in an order of their own, without what no two runs have in common."""
    text = text.replace(str(directory), "HERE")
    text = re.sub(r"0x[0-9a-f]+", "0x", text)
    ours = "TORCHELASTIC|TMPDIR|FT_TEST|PYTHON|TORCH_NCCL|MEGATRON_FT|NVRX"
    text = re.sub(rf"'({ours})\w*', ", "", text)
    return sorted(text.splitlines())


def test_a_forked_rank_ends_as_a_fresh_one_does(launcher: Launcher, tmp_path: Path) -> None:
    """Exit codes, and what is printed: of exceptions, of hooks, of threads."""
    script = str(SUPPORT / "endings.py")
    count = len(re.findall(r'^    "[^"]+": ', (SUPPORT / "endings.py").read_text(), re.MULTILINE))
    logs = tmp_path / "logs"
    options = [f"--max-restarts={count}", "--ft-max-no-progress-cycles=0", "--redirects=3", f"--log-dir={logs}"]
    launched = launcher.start([script], *options)
    finished = launched.wait(100)
    launched.assert_nothing_left()
    assert finished.code == 0, finished.err
    assert was_forked(launched)
    exits = launched.events("rank_exited")
    assert len(exits) == count == 13
    for event in exits:
        env = {**clean_environment(), "FT_CYCLE": str(event["cycle"])}
        fresh = subprocess.run(
            [sys.executable, "-u", script], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        (directory,) = logs.glob(f"*/attempt_{event['cycle']}/0")
        assert event["exitcode"] == fresh.returncode
        assert (directory / "stdout.log").read_text() == fresh.stdout
        assert normal((directory / "stderr.log").read_text(), tmp_path) == normal(fresh.stderr, tmp_path)


PACKAGE = """
import sys
print(__name__, __package__, __spec__.name, sys.argv[1:], sys.path[0] == __import__("os").getcwd(), __file__)
if len(sys.argv) > 1:
    raise ValueError(sys.argv[1:])
"""


@pytest.mark.parametrize("words", [["package"], ["package.module", "x"]])
def test_a_module_runs_as_under_python(launcher: Launcher, tmp_path: Path, words: list[str]) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for name, text in (("__init__", ""), ("__main__", PACKAGE), ("module", PACKAGE)):
        (package / f"{name}.py").write_text(text)
    env = {**clean_environment(), "PYTHONPATH": str(tmp_path)}
    launched = launcher.start(words, "-m", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    ours = launched.wait()
    fresh = subprocess.run(
        [sys.executable, "-u", "-m", *words], cwd=launched.directory, env=env, capture_output=True, text=True
    )
    assert was_forked(launched) == (not END_IS_TOO_LATE)
    assert (ours.out, ours.code != 0) == (fresh.stdout, fresh.returncode != 0)
    theirs = normal(fresh.stderr, tmp_path)
    assert set(theirs) - set(normal(ours.err, tmp_path)) == set()


def test_rank_of_a_launcher_without_standard_streams_gets_dev_null(launcher: Launcher) -> None:
    """As a daemon starts it."""
    script = "open('found', 'w').write(str([os.readlink(f'/proc/self/fd/{fd}') for fd in range(3)])); print('nowhere')"
    launched = launcher.start(script, prefix=["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash"])
    assert launched.wait().code == 0
    assert (launched.directory / "found").read_text() == "['/dev/null', '/dev/null', '/dev/null']"
    assert was_forked(launched)


def test_preload_none_starts_no_fork_server(launcher: Launcher) -> None:
    launched = launcher.start("say('ran')", "--ft-preload=none")
    assert launched.wait().out == "ran\n"
    assert launched.events("fork_server") == []
