"""Warns before and after, once for each place."""

import os
import warnings


def warn():
    warnings.warn("careful", stacklevel=1)


warn()
warn()
warnings.filterwarnings("ignore", message="not this")
os.environ["RANK"]
warn()
warnings.warn("not this", stacklevel=1)
warnings.warn("but this", stacklevel=1)
raise SystemExit(3)
