"""Where this Python keeps what is installed."""

from __future__ import annotations

import os
import site
import sysconfig

__all__ = ["installed_roots"]


def installed_roots() -> list[str]:
    """Directories of installed packages and of the standard library, each with a final slash."""
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    return sorted(path.rstrip(os.sep) + os.sep for path in paths if path)
