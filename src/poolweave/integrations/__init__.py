"""poolweave inside other engines: one package an engine, loaded by that engine and by nobody else."""
