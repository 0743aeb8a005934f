"""Imports a library that copies the environment."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "parts", "site-packages"))
import copies_environment

print(copies_environment.COPY["RANK"])
sys.exit(3)
