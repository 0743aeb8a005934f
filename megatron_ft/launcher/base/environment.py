"""The launcher's environment as it is passed on to the user's processes."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["without_secret"]


def without_secret(environ: Mapping[str, str]) -> dict[str, str]:
    """All but the job's secret: scripts log their environment. Who may read FT_SECRET_FILE is up to the file's mode."""
    return {name: value for name, value in environ.items() if name != "FT_SECRET"}
