"""This launcher's part in the control plane: its connection, its coordinator, and where its ranks meet."""
