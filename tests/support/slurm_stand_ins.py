"""Stand-ins for srun, scancel and scontrol: programs that do on this machine what Slurm would on its nodes.

What they are told is in ``calls``; the state of the job, and which launchers run, is in files beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["install"]

_COMMON = """#!{python} -S
import json, os, signal, subprocess, sys, time
home = {home!r}
def path(name): return os.path.join(home, name)
def read(name, default=""):
    try:
        return open(path(name)).read()
    except FileNotFoundError:
        return default
with open(path("calls"), "a") as file:
    file.write(json.dumps([{name!r}, *sys.argv[1:]]) + "\\n")
"""
_SRUN = """
options = [word for word in sys.argv[1:] if word.startswith("--")]
rest = sys.argv[1:]
while rest[0].startswith("--"):
    option, _, value = rest.pop(0).partition("=")
    if option == "--ntasks":
        count = int(value)
    elif option == "--export":
        os.environ["SLURM_EXPORT_ENV"] = value  # sbatch sets it to what it was given
export = os.environ.get("SLURM_EXPORT_ENV", "ALL").split(",")
if "ALL" not in export:
    for name in [name for name in os.environ if not name.startswith("SLURM_") and name not in (*export, "PYTHONPATH")]:
        del os.environ[name]
step = int(read("steps", "0"))
open(path("steps"), "w").write(str(step + 1))
said = {"SLURM_STEP_ID": step, "SLURM_STEP_NUM_TASKS": count, "SLURM_STEP_NUM_NODES": count}
tasks = []
for rank in range(count):
    mine = {**said, "SLURM_STEP_NODELIST": "localhost", "SLURM_PROCID": rank}
    tasks.append(subprocess.Popen(rest, env={**os.environ, **{name: str(value) for name, value in mine.items()}}))
open(path("pids"), "w").write(" ".join(str(task.pid) for task in tasks))
codes = [task.wait() for task in tasks]
os.unlink(path("pids"))
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
_SCANCEL = """
for pid in read("pids").split():
    os.kill(int(pid), signal.SIGTERM)
"""
_SCONTROL = """
if "show" in sys.argv:
    print(read("job", "JobId=7 JobState=RUNNING NodeList=localhost NumNodes=" + os.environ["SLURM_JOB_NUM_NODES"]))
elif "requeue" in sys.argv:
    os.kill(os.getppid(), signal.SIGKILL)
"""


def install(home: Path) -> Path:
    """Write them into a folder, which is to be first in PATH."""
    folder = home / "bin"
    folder.mkdir(parents=True)
    for name, text in (("srun", _SRUN), ("scancel", _SCANCEL), ("scontrol", _SCONTROL)):
        program = folder / name
        program.write_text(_COMMON.format(python=sys.executable, home=str(home), name=name) + text)
        program.chmod(0o755)
    return folder
