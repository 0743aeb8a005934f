"""Learning on a launcher."""
