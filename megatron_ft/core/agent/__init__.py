"""The launcher's machine: the life of a cycle on one node. No I/O: time, and what the ranks show, are arguments."""
