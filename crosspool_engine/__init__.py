"""Decoding several cold MoE models from one KV pool and one weights pool."""
