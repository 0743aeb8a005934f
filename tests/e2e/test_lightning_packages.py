"""``lightning.pytorch`` and ``pytorch_lightning``: either, whichever is used, and a word if there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FORKS = """
import json, os, sys, traceback, torch
for name, directory, without, lines in json.load(sys.stdin):
    if os.fork() == 0:
        sys.path.insert(0, directory)
        sys.modules.update(dict.fromkeys(without))
        try:
            exec(lines)
        except ImportError as error:
            print(name, type(error).__name__, error, flush=True)
        os._exit(0)
    os.wait()
"""
"""Each case is a fork of one interpreter that has imported torch."""
FIND = """
from megatron_ft.integrations.lightning import FaultToleranceSectionsCallback
bases = [c.__module__ for c in FaultToleranceSectionsCallback.__mro__ if c.__name__ == "Callback"]
print(name, bases, [each for each in ("lightning", "pytorch_lightning") if sys.modules.get(each)], flush=True)
"""
BOTH = {"lightning.pytorch": "class Callback: pass", "pytorch_lightning": "class Callback: pass"}
CASES = {
    "none is imported": (BOTH, (), "", "['lightning.pytorch', 'pytorch_lightning'] ['lightning', 'pytorch_lightning']"),
    "the other is imported": (BOTH, (), "import pytorch_lightning", "['pytorch_lightning'] ['pytorch_lightning']"),
    "both are imported": (
        *(BOTH, (), "import pytorch_lightning, lightning.pytorch"),
        "['lightning.pytorch', 'pytorch_lightning'] ['lightning', 'pytorch_lightning']",
    ),
    "the other is installed": (BOTH, ("lightning",), "", "['pytorch_lightning'] ['pytorch_lightning']"),
    "one is broken": (BOTH | {"lightning.pytorch": "import not_there"}, (), "", "['pytorch_lightning'] "),
    "none is installed": ({}, ("lightning", "pytorch_lightning"), "", "ImportError "),
}


def test_lightning_packages_that_can_be_imported_are_served_and_those_imported_first(tmp_path: Path) -> None:
    cases = []
    for number, (name, (packages, without, first, _)) in enumerate(CASES.items()):
        directory = tmp_path / str(number)
        for package, text in packages.items():
            path = Path(directory, *package.split("."), "__init__.py")
            path.parent.mkdir(parents=True)
            path.parent.parent.joinpath("__init__.py").touch()
            path.write_text(text)
        cases.append((name, str(directory), without, first + FIND))
    command, given = [sys.executable, "-c", FORKS], json.dumps(cases)
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True, timeout=60)
    lines = done.stdout.splitlines()
    for name, line in zip(CASES, lines, strict=True):
        assert line.startswith(f"{name} {CASES[name][-1]}")
    assert ["pip install 'megatron_ft[lightning]'" in line for line in lines] == [False] * (len(CASES) - 1) + [True]
