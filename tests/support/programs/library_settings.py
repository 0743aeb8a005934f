"""Imports a library that goes over all variables and keeps those that it knows."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "parts", "site-packages"))
import keeps_settings

print(keeps_settings.RANK, keeps_settings.WORLD_SIZE, os.environ["RANK"])
sys.exit(3)
