"""The coordinator of a job: a process of its own, beside a launcher or on any machine that the launchers reach."""
