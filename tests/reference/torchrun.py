"""``python tests/reference/torchrun.py TEST_RUN ...``: PyTorch's own tests of torchrun, with our ``main`` in its place.

TEST_RUN is ``test/distributed/launcher/test_run.py`` of a PyTorch checkout, its folder ``bin`` beside it. The tests
run from a copy in which ``launch.main`` is our launcher's; nothing else is changed. They run under the torch that is
installed here: a file of another version may ask for what this one doesn't have.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # this file is run as a script
from tests.support.campaigns import run_pytest

TORCHRUN, OURS = "import torch.distributed.run as launch", "from megatron_ft.launcher.main import main as ft_main"
LEFT_OUT = {
    "test_launch_shutdown": "replaces the agent and the rendezvous handler inside torch's own launch_agent",
}
LONGEST_S = 900.0


def main() -> int:
    """0 if every test passed, or is left out for a reason that stands here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("test_run", nargs="+", type=Path)
    parser.add_argument("-k", metavar="EXPRESSION", default="", help="only these tests, as pytest selects them")
    given = parser.parse_args()
    failed = 0
    for test_run in given.test_run:
        results = run(test_run.resolve(), given.k)
        for name, problem in results.items():
            reason = LEFT_OUT.get(name.rpartition("::")[2])
            print(f"{name}: {f'left out: {reason}' if problem and reason else problem or 'passed'}", flush=True)
            failed += bool(problem) and reason is None and not problem.startswith("skipped")
        passed = sum(not problem for problem in results.values())
        print(f"{test_run}: {passed} of {len(results)} passed, {failed} failed", flush=True)
        failed += not results
    return min(failed, 1)


def adapted(source: str) -> str:
    """The source of a test file that calls our launcher's ``main`` wherever it called torchrun's.

    Raises:
        ValueError: it calls torchrun's in no way that is known here.
    """
    if TORCHRUN not in source:
        raise ValueError(f"no line reads {TORCHRUN!r}")
    return re.sub(r"\blaunch\.main\b", "ft_main", source).replace(TORCHRUN, f"{TORCHRUN}\n{OURS}")


def run(test_run: Path, expression: str) -> dict[str, str]:
    """By test: how it failed or why it was skipped, empty if it passed."""
    with tempfile.TemporaryDirectory(prefix="ft_torchrun") as directory:
        copy, report = Path(directory, "launcher", "test_run.py"), Path(directory, "report.xml")
        shutil.copytree(test_run.parent, copy.parent)
        copy.write_text(adapted(test_run.read_text()))
        words = ["--rootdir", directory, "--timeout=240", "-k", expression, str(copy)]
        env = {"TMPDIR": directory, "PYTHONDONTWRITEBYTECODE": "1", "XDG_STATE_HOME": directory}
        return run_pytest(words, report, cwd=Path(directory), env=env, timeout_s=LONGEST_S)


if __name__ == "__main__":
    sys.exit(main())
