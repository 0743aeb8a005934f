"""The launcher's state machine: the life of a cycle on one node. No I/O: time and the ranks' readings are arguments."""
