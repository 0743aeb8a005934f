"""Imports a module that runs a program with its rank."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "parts"))
import asks_shell  # noqa: F401

sys.exit(3)
