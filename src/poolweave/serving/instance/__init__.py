"""One instance: its settings, its models, the flows that it takes part in, and what it does for a request."""
