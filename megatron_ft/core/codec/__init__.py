"""How frozen dataclasses become JSON and back: one mechanism, with one kind of error, for messages and records."""
