"""Reads RANK."""

import os

RANK = int(os.environ.get("RANK", -1))
SEEN = "LOCAL_RANK" in os.environ
print("imported by rank", RANK)
