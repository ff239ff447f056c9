"""Running instances: the torch engine, PD flows, processes, the command line."""
