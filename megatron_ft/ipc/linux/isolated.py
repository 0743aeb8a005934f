"""How a process of ours is started that has nothing of the user's in it."""

from __future__ import annotations

import os
import sys

__all__ = ["isolated_command"]

_BOOT = "import sys; sys.path.append(sys.argv.pop(1)); from {}.__main__ import main; sys.exit(main())"


def isolated_command(package: str) -> list[str]:
    """What runs ``main`` of a package of ours (``megatron_ft.monitor``) in a new interpreter; its arguments follow.

    Isolated (-I) and without site (-S): neither the user's PYTHONPATH, nor a file named json.py in his working
    directory, nor anything a .pth file imports gets into it. It has the standard library and us.
    """
    above = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    return [sys.executable, "-I", "-S", "-c", _BOOT.format(package), above]
