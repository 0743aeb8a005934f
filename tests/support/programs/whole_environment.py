"""Copies all variables at its beginning, and looks into the copy."""

import os
import sys

COPY = dict(os.environ)
print(COPY["RANK"], COPY.get("LOCAL_RANK"), "MASTER_PORT" in COPY)
sys.exit(3)
