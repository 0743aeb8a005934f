"""A rank starts programs in another Python, which inherits PYTHONPATH, and with it our startup directory."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_ft.run_ahead.startup import STARTUP

NAMES = ("python2", "python2.7", *(f"python3.{minor}" for minor in range(4, 16)), "pypy3")


def interpreters() -> list[str]:
    """Paths of the Pythons of this machine, also of those that pyenv has."""
    found = {path for name in NAMES if (path := shutil.which(name)) is not None and "shims" not in path}
    installed = Path.home().glob(".pyenv/versions/*/bin/python")
    return sorted({os.path.realpath(path) for path in (*found, *installed)})


@pytest.mark.parametrize("python", interpreters())
@pytest.mark.parametrize("hides", [False, True])
def test_another_python_neither_prints_nor_fails_because_of_the_startup_directory(
    python: str, hides: bool, tmp_path: Path
) -> None:
    """``hides``: there is a sitecustomize of the user's, which it loads."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.stdout.write('of the user, ')\n")
    done = subprocess.run(
        [python, "-c", "import sys; sys.stdout.write('%d' % len([p for p in sys.path if 'startup' in p]))"],
        env={
            "PYTHONPATH": f"{STARTUP}:{tmp_path}" if hides else STARTUP,
            "PYTHONDONTWRITEBYTECODE": "1",
            "MEGATRON_FT_REFERENCE_NAMES": "on",
            "FT_WATCH_COLLECTIVES": "on",
            "WORLD_SIZE": "2",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "of the user, 0" if hides else "0", "")
