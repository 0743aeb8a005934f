"""``python tests/reference/campaign.py CHECKOUT ...``: tests of nvidia-resiliency-ext get our callbacks and managers.

Not a byte of a checkout (v0.4.1 to v0.7.0) is changed: its tests import its names under ``ft_launcher``, and find ours.
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
}
LONGEST_S = 600.0


def main() -> int:
    """0 if every test passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="groups whose arguments hold this")
    args, failed = parser.parse_args(), 0
    for file, reason in LEFT_OUT.items():
        print(f"left out: {file}: {reason}")
    for checkout in args.checkout:
        for group in (each for each in GROUPS if args.only in " ".join(each)):
            results = run(checkout.resolve(), group) or {" ".join(group): "no test was run"}
            for name, problem in results.items():
                print(f"{checkout.name}: {name}: {problem or 'passed'}", flush=True)
                failed += bool(problem)
    return min(failed, 1)


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
