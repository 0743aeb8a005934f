"""The exception that a rank ends of, where torch looks for it: also without torch's ``@record`` around ``main``."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from types import TracebackType

__all__ = ["told_by", "write_error_file"]

_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def write_error_file(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    """In the format of torch's error handler; one that is there stays, and that none can be written is no matter."""
    path = os.environ.get(_VARIABLE)
    if not path or not isinstance(error, Exception):
        return
    document = {
        "message": {
            "message": told_by(kind, error),
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(kind, error, where)),
                "timestamp": str(int(time.time())),
            },
        }
    }
    with contextlib.suppress(OSError, ValueError), open(path, "x") as file:
        json.dump(document, file)


def told_by(kind: type[BaseException], error: BaseException) -> str:
    """Type and message of an exception."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a user's class may raise anything here, and that would hide what it is about
        text = "(its text can't be read)"
    return f"{kind.__name__}: {text}"
