"""Messages between the processes of this package, each a frozen dataclass."""
