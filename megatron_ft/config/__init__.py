"""Options: names, allowed values, and the values in effect."""
