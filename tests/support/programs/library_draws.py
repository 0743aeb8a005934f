"""Imports a library that draws from the system."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "parts", "site-packages"))
import draws_numbers

print(len(str(draws_numbers.NAME)))
sys.exit(3)
