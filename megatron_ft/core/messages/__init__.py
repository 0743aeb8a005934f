"""What our processes say to each other, each message a frozen dataclass, and how they become JSON and back."""
