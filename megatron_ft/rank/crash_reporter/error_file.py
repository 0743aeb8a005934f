"""Writes the exception that ends a rank to torch's error file, also without torch's ``@record`` around ``main``."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback

from megatron_ft.diagnosis.exceptions import innermost_error
from megatron_ft.link.base.rank_variables import ERROR_FILE_VARIABLE


def write_error_file(error: BaseException | None) -> None:
    """Write the format of torch's error handler. An existing file is kept, and failures to write are ignored."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path or not isinstance(error, Exception):
        return
    document = {
        "message": {
            "message": type_and_message(error),
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "timestamp": str(int(time.time())),
            },
        }
    }
    with contextlib.suppress(OSError, ValueError), open(path, "x") as file:
        json.dump(document, file)


def type_and_message(error: BaseException) -> str:
    """Return type and message of an exception, as in "ValueError: no such layer"; of a group, also its first one's.

    Of an exception that hands on a traceback (a data loader's), those at its end.
    """
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a user's class may raise anything here, and that would hide what it is about
        text = "(its text can't be read)"
    within = getattr(error, "exceptions", None)
    if isinstance(within, tuple) and within and isinstance(within[0], BaseException):  # a group's, from Python 3.11 on
        text = f"{text}: {type_and_message(within[0])}"
    return innermost_error(f"{type(error).__name__}: {text}")
