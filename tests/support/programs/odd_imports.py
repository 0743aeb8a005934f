"""Imports modules that seed generators, add an argument, or fail after they have printed something."""

import os
import random
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "parts"))
import adds_argument
import seeds_numbers

try:
    import fails_loudly
except RuntimeError as error:
    fails_loudly = error

print(sys.argv[1:], adds_argument.FOUND, fails_loudly, "fails_loudly" in sys.modules)
print(seeds_numbers.FIRST, random.random(), os.environ["RANK"])
sys.exit(3)
