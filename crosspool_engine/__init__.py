"""Decoding several cold MoE models from one KV pool and one weights pool."""

from poolweave.crosspool_engine.config import EngineConfig
from poolweave.crosspool_engine.engine import DecodeEngine, EngineStats
from poolweave.crosspool_engine.model_shape import ModelShape
from poolweave.crosspool_engine.request import DecodeRequest, Emitted, Generation
from poolweave.crosspool_engine.served_model import owners_in_plan

__all__ = [
    "DecodeEngine",
    "DecodeRequest",
    "Emitted",
    "EngineConfig",
    "EngineStats",
    "Generation",
    "ModelShape",
    "owners_in_plan",
]
