"""Ranks that share what they import: forks of a process that imports, and runs no statement of the script.

**What is promised.** A rank does what a fresh interpreter does. `startup/sitecustomize.py` is imported by Python
before the script; in the process that the launcher starts as *fork server* it imports modules, waits for orders, and
returns only in forks. In a fork Python then goes on with its own start: `-m`, `__spec__`, `sys.argv`, `sys.path[0]`,
tracebacks and `__main__` are Python's. All that a script does, it does itself, in each rank and each cycle.

**What is imported** (`leading`). The user's `sitecustomize` and `usercustomize`; modules of ``--ft-preload``; then
what the script's leading statements import, in their order. Changes of `os.environ`, `sys.path` and warning filters
from constants are applied before, because the imports may depend on them, and undone in each fork, where the script
makes them. Statements that only read are skipped; any other one ends the list. In later cycles, also modules of
installed packages already shared that ranks have loaded since (`rank/base/loaded_modules.py`).

**What must not be imported** (`acts`). An import that acts would act once, not in each rank: it reads what differs
between ranks, draws numbers, or does something to the world. Most acts are seen before they are done, by audit events
and a few stand-ins; what C code leaves (threads, open files, shared memory, CUDA) is found after each statement. The
server then tells the launcher, and ends: there is no way back from half an import. The ranks of that cycle are fresh
interpreters at once, and another server leaves that statement out. `fork_point()` is the user's word that all imports
above it are harmless.

**What a fork changes** (`server.ForkServer.become_rank`): variables, standard streams, generators of Python and numpy,
multiprocessing's key, the name, the mask of signals. Nothing of the watch is left, but an audit hook of C.

**Who is whose child** (`forking_spawner`, the launcher's side). The launcher is child subreaper and adopts ranks, which
the server's death doesn't touch. A rank waits until the launcher has watched it and printed the start of the cycle.
"""


def fork_point() -> None:
    """Vouch for all imports above this line: ``ft_launcher`` shares them between ranks, whatever they do.

    It does nothing when it is called.
    """
