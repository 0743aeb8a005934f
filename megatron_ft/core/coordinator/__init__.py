"""The coordinator's machine: who leads, who trains with whom, what a failure means for the job. No I/O."""
