"""Sets variables, and reads them and others, before and after its imports."""

import os
import sys

os.environ["MINE"] = "before"
os.environ.pop("HOME", None)
os.environ.setdefault("OTHER", "set")
import tqdm  # noqa: F401 - walks over all variables

held = os.environ
from os import environ, environb  # noqa: E402

print(held is os.environ, type(os.environ).__name__, type(os.environ).__module__)
print("MINE", os.getenv("MINE"), "HOME" in os.environ, os.environ["OTHER"])
print(environ.get("RANK"), environ["LOCAL_RANK"], environb[b"WORLD_SIZE"], os.getenv("RANK"), held is environ)
print("MASTER_ADDR" in dict(os.environ), sorted(os.environ) == sorted(os.environ.copy()), "RANK" in str(os.environ))
os.environ["RANK"] = "9"
print(os.environ["RANK"], environb[b"RANK"], type(environ).__mro__[0] is type(environb))
sys.exit(3)
