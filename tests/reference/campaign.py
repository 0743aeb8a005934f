"""``python tests/reference/campaign.py PATH ...``: tests of others get this package in place of what they test.

PATH is a checkout of nvidia-resiliency-ext (v0.4.1 to v0.7.0), or ``test/distributed/launcher/test_run.py`` of one of
PyTorch, its folder ``bin`` beside it. The tests of torchrun run from a copy in which ``launch.main`` is our launcher's,
under the torch that is installed here: a file of another version may ask for what this one doesn't have.

Not a byte of nvidia-resiliency-ext is changed: its tests import its names under ``ft_launcher``, and find ours.
Beside that stands only what a machine without GPU needs (gpu_is_cpu.py), and what stands for the files of checkpoints
that are in memory (local_in_memory.py). Tests of stragglers need CUPTI, and aren't run. LEFT_OUT says what else isn't.

Install lightning 2.4.0 (pip install --no-deps --target DIRECTORY lightning==2.4.0 pytorch-lightning==2.4.0) and
defusedxml, and say where in PYTHONPATH. Since 0.6 its launcher, whose parser and tests are used, needs grpcio,
protobuf and httpx, too, and its .proto files compiled, as its build does. Lightning 2.5 and 2.6 save at other
iterations: there one, and three, of the tests of when timeouts are updated fail, with the reference's own callbacks,
too.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # this file is run as a script
from tests.support.campaigns import run_pytest

FOLDER = "tests/ptl_resiliency/unit"
SECTIONS, INVALID = f"{FOLDER}/test_ft_callback_sections.py", "test_invalid_config"
LOCAL = "tests/checkpointing/unit/test_basic_local.py"
GPU, MEMORY = ("-p", "gpu_is_cpu"), ("-p", "local_in_memory")
OUR_LAUNCHER = "tests/fault_tolerance/unit/test_launcher.py"
GROUPS = (
    ("tests/fault_tolerance/unit/test_config.py",),
    # those that start the command ft_launcher, which is ours; the others replace parts of the reference's launcher
    (OUR_LAUNCHER, "-k", "test_rank or test_launcher_sigterm or test_missing or test_config_provided"),
    (*GPU, f"{FOLDER}/test_ft_callback_hb.py"),
    (*GPU, SECTIONS, "-k", f"not {INVALID}"),
    # with such a configuration our callback asks the launcher not to restart: that ends pytest, too, soon after
    (*GPU, SECTIONS, "-k", f"{INVALID} and monitors0"),
    (*GPU, SECTIONS, "-k", f"{INVALID} and monitors1"),
    # the tests above delete RANK from their environment, which Lightning needs here
    (*GPU, f"{FOLDER}/test_local_ckpt_callback.py"),
    # each begins again at iteration 1, which a process does only once
    *((*MEMORY, LOCAL, "-k", f"scenarios and {flags}") for flags in ("True-True", "True-False", "False-True")),
    (*MEMORY, LOCAL, "-k", "scenarios and False-False or repl_disable"),
)
LEFT_OUT = {
    "tests/checkpointing/unit/test_cleanup.py": (
        "it reads from the log how long nvidia-resiliency-ext's function takes that removes old files; ours has none"
    ),
    "test_launch_shutdown": "replaces the agent and the rendezvous handler inside torch's own launch_agent",
}
TORCHRUN, OURS = "import torch.distributed.run as launch", "from megatron_ft.launcher.main import main as ft_main"
LONGEST_S = 900.0


def main() -> int:
    """0 if every test passed, or is left out for a reason that stands here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="groups whose arguments hold this; of torchrun's as pytest's -k")
    args, failed = parser.parse_args(), 0
    for name, reason in LEFT_OUT.items():
        print(f"left out: {name}: {reason}")
    for path in args.path:
        if path.is_file():
            results = of_torchrun(path.resolve(), args.only) or {str(path): "no test was run"}
        else:
            results = {}
            for group in (each for each in GROUPS if args.only in " ".join(each)):
                results |= run(path.resolve(), group) or {" ".join(group): "no test was run"}
        for name, problem in results.items():
            print(f"{path.name}: {name}: {problem or 'passed'}", flush=True)
            is_bearable = path.is_file() and (name.rpartition("::")[2] in LEFT_OUT or problem.startswith("skipped"))
            failed += bool(problem) and not is_bearable
    return min(failed, 1)


def of_torchrun(test_run: Path, expression: str) -> dict[str, str]:
    """By test of torchrun: how it failed or why it was skipped, empty if it passed.

    Raises:
        ValueError: the file calls torchrun's ``main`` in no way that is known here.
    """
    source = test_run.read_text()
    if TORCHRUN not in source:
        raise ValueError(f"no line reads {TORCHRUN!r}")
    source = re.sub(r"\blaunch\.main\b", "ft_main", source).replace(TORCHRUN, f"{TORCHRUN}\n{OURS}")
    with tempfile.TemporaryDirectory(prefix="ft_torchrun") as directory:
        copy, report = Path(directory, "launcher", "test_run.py"), Path(directory, "report.xml")
        shutil.copytree(test_run.parent, copy.parent)
        copy.write_text(source)
        words = ["--rootdir", directory, "--timeout=240", "-k", expression, str(copy)]
        env = {"TMPDIR": directory, "PYTHONDONTWRITEBYTECODE": "1", "XDG_STATE_HOME": directory}
        return run_pytest(words, report, cwd=Path(directory), env=env, timeout_s=LONGEST_S)


def run(checkout: Path, group: tuple[str, ...]) -> dict[str, str]:
    """By test: how it failed, empty if it passed."""
    with tempfile.TemporaryDirectory(prefix="ft_reference") as directory:
        paths = [str(checkout / "src"), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {"TMPDIR": directory, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        launch = ["-m", "megatron_ft", "launch", f"--ft-log-dir={directory}/logs", "--max-restarts=0"]
        launch += [f"--nproc-per-node={2 if LOCAL in group else 1}"]
        prefix = launch if OUR_LAUNCHER not in group else []
        report = Path(directory, "report.xml")
        return run_pytest(group, report, cwd=checkout, env=env, timeout_s=LONGEST_S, prefix=prefix)


if __name__ == "__main__":
    sys.exit(main())
