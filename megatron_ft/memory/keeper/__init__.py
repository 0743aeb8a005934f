"""The keeper: one process per node that holds the memory checkpoints of its ranks. Never torch or numpy."""
