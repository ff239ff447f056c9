"""Studies that `poolweave bench` runs: what transfers cost on this machine, as tables, JSON and pictures."""
