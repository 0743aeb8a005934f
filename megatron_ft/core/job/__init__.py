"""The control plane: what launchers and coordinator tell each other, a launcher's part, the restart policy. No I/O."""
