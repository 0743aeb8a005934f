"""Asks for a variable that the launcher might have set, and hasn't."""

import os

print("asks")
os.environ["TORCHELASTIC_NOBODY_SETS_THIS"]
