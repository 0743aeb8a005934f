"""Has a shell say its rank."""

import subprocess

subprocess.run(["sh", "-c", "echo rank $RANK"], check=True)
