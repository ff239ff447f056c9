"""`poolweave flows`: the same sessions through every flow over real processes, held against an oracle."""
