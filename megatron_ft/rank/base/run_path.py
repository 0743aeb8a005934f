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


class _Others:
    """The other ranks of this node; each holds an end of a pipe while its script runs."""

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._pipe = None
        told = os.environ.pop("MEGATRON_FT_RUN_PATH", "")
        if not told:
            return  # started by hand
        self._ends = [int(end) for end in told.split(",")]
        for end in self._ends:
            os.set_inheritable(end, False)
        self._pipe = os.fstat(self._ends[0])
        os.register_at_fork(after_in_child=self._leave)  # a child may outlive its rank

    def wait_for_other_ranks(self) -> None:
        """Return when the scripts, or the processes, of all ranks have ended."""
        if not all(map(self._is_ours, self._ends)) or not self._ends:
            return  # closed by the script: the numbers may belong to other files now
        read, write = self._ends
        os.close(write)
        self._ends = [read]
        os.read(read, 1)
        os.close(read)
        self._ends = []
        time.sleep(_PAUSE_S)

    def _leave(self) -> None:
        for end in filter(self._is_ours, self._ends):
            os.close(end)
        self._ends = []

    def _is_ours(self, end: int) -> bool:
        try:
            return self._pipe is not None and os.path.samestat(os.fstat(end), self._pipe)
        except OSError:
            return False


def _main() -> None:
    others = _Others()

    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.run import run_script_path

    try:
        record(run_script_path)(*sys.argv[1:])
    except SystemExit as end:
        if end.code:
            raise
    _end_monitoring()
    others.wait_for_other_ranks()


def _end_monitoring() -> None:
    """Disconnect: a rank whose script has ended isn't hung, however long the other ranks take."""
    module = sys.modules.get("megatron_ft.rank.client.client")
    for client in [] if module is None else list(module._clients):
        with contextlib.suppress(Exception):  # the script has succeeded, whatever this raises
            client.shutdown_workload_monitoring()


_main()
