"""A pool in a process of its own, and what engines say to it."""
