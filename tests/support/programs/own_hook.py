"""Has a hook for exceptions of its own, and fails after it knows its rank."""

import os
import sys


def hook(kind, error, _traceback):
    print("hook", kind.__name__, error, os.environ["RANK"])


sys.excepthook = hook
raise RuntimeError("no")
