"""Imports a module that reads RANK while it is imported."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "parts"))
print("before")
import reads_rank  # noqa: E402

print(reads_rank.RANK, reads_rank.SEEN, os.environ["RANK"])
sys.exit(3)
