"""Base of all parts of a rank: its place among the ranks, its connection to the monitor, its lines."""
