"""Entry of a rank with ``--run-path``: runs the script as torchrun does, then waits for the node's other ranks.

Run as a program's text, not imported: the script's Python may not find this package.
"""

import contextlib
import os
import sys
import time

_PAUSE_S = 0.1
"""Seconds between the end of the last rank's script and the exits, as long as torch's agent takes to see that end.
Threads of process groups release their last tensors meanwhile; doing so during the exit aborts the process."""


def _main() -> None:
    told = os.environ.pop("MEGATRON_FT_RUN_PATH", "")  # nothing if it was started by hand
    # the ends of a pipe, which each rank of this node holds while its script runs
    ends = [int(end) for end in told.split(",") if end]
    pipes = [os.fstat(end) for end in ends]

    def is_ours(end: int) -> bool:
        """Return False if the script has closed it: the number may belong to another file then."""
        try:
            return os.path.samestat(os.fstat(end), pipes[0])
        except OSError:
            return False

    def leave() -> None:
        for end in filter(is_ours, ends):
            os.close(end)
        ends.clear()

    for end in ends:
        os.set_inheritable(end, False)
    os.register_at_fork(after_in_child=leave)  # a child may outlive its rank

    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.run import run_script_path

    try:
        record(run_script_path)(*sys.argv[1:])
    except SystemExit as end:
        if end.code:
            raise
    _end_monitoring()
    if ends and all(map(is_ours, ends)):
        os.close(ends.pop())
        os.read(ends[0], 1)  # returns when the scripts, or the processes, of all ranks have ended
        leave()
        time.sleep(_PAUSE_S)


def _end_monitoring() -> None:
    """Disconnect: a rank whose script has ended isn't hung, however long the other ranks take."""
    module = sys.modules.get("megatron_ft.rank.client.client")
    for client in [] if module is None else list(module._clients):
        with contextlib.suppress(Exception):  # the script has succeeded, whatever this raises
            client.shutdown_workload_monitoring()


_main()
