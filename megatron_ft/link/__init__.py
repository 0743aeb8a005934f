"""The bottom of the house: what processes are built from. It imports nothing of ours but pure values."""
