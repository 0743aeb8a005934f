"""What all of a rank's parts use: its place among the ranks, its connection to the monitor, its lines."""
