"""Runs programs, before it knows its rank and after."""

import os
import subprocess
import sys

subprocess.run(["echo", "a program"], check=True)
os.system("echo rank $RANK")
print(subprocess.check_output(["sh", "-c", "echo $LOCAL_RANK $PYTHONPATH"], text=True))
sys.exit(3)
