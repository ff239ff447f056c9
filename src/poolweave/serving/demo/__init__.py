"""`poolweave demo`: PD caching and CrossPool together, over three cold MoE models, on real processes."""
