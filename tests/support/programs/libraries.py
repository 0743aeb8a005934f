"""Imports libraries that copy the environment, draw from the system, and keep those variables that they know."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "parts", "site-packages"))
import copies_environment
import draws_numbers
import keeps_settings

print(copies_environment.COPY["RANK"], len(str(draws_numbers.NAME)))
print(keeps_settings.RANK, keeps_settings.WORLD_SIZE, os.environ["RANK"])
sys.exit(3)
