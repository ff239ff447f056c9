"""Decoding several cold MoE models from one KV pool and one weights pool."""

from poolweave.crosspool_engine.brought_kv import BroughtKv
from poolweave.crosspool_engine.config import EngineConfig
from poolweave.crosspool_engine.engine import DecodeEngine
from poolweave.crosspool_engine.engine_stats import EngineStats
from poolweave.crosspool_engine.ffn_placement import FfnPart, FfnPlacement
from poolweave.crosspool_engine.model_shape import ModelShape
from poolweave.crosspool_engine.planned import check_machine, planned_config, planned_serving
from poolweave.crosspool_engine.request import DecodeRequest, Emitted, Generation
from poolweave.crosspool_engine.served_model import Serving

__all__ = [
    "BroughtKv",
    "DecodeEngine",
    "DecodeRequest",
    "Emitted",
    "EngineConfig",
    "EngineStats",
    "FfnPart",
    "FfnPlacement",
    "Generation",
    "ModelShape",
    "Serving",
    "check_machine",
    "planned_config",
    "planned_serving",
]
