"""The options: what they are called, what they may hold, and what they come to."""
