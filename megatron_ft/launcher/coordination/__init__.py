"""This launcher's part in the control plane of its job: one connection to the coordinator, and what follows from it."""
