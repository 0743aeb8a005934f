"""What our processes say to each other, each message a frozen dataclass."""
