"""Facts about the user's script, set by the parts of a rank that know them."""

began_ns = 0
"""CLOCK_MONOTONIC nanoseconds at which it began in a forked rank; 0 in a fresh interpreter, which begins with it."""
reports_iterations = False
"""True if the script reports iterations. Then a "step" doesn't prove training: it may be one of an evaluation."""
