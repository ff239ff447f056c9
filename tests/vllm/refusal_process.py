"""Starts real vLLM engines that must not start, each in a fork of one process that has imported vLLM once.

`refusal_process.py <json: {case: LLM's arguments}>`: a JSON line a case on the original stdout, {case: why it refused}.
With "config_only" no engine starts: the connector is built on vLLM's configuration of one, whatever machine that wants.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from poolweave.errors import PoolweaveError


def connector_alone(**arguments: Any) -> None:
    """vLLM's own configuration of this engine, and the connector that its scheduler would build."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from poolweave.integrations.vllm import PoolConnector

    config = EngineArgs(**arguments).create_engine_config()
    heads = config.model_config.get_num_kv_heads(config.parallel_config)
    spec = FullAttentionSpec(
        block_size=config.cache_config.block_size, num_kv_heads=heads, head_size=config.model_config.get_head_size(),
        dtype=torch.float32,
    )  # fmt: skip
    layers = [f"layer.{i}" for i in range(config.model_config.get_num_layers(config.parallel_config))]
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(layers, spec)])
    PoolConnector(config, KVConnectorRole.SCHEDULER, cache).shutdown()


def refusal(arguments: dict[str, Any]) -> str:
    """What the engine says instead of starting; "" when it starts."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    arguments["kv_transfer_config"] = KVTransferConfig(**arguments["kv_transfer_config"])
    build = connector_alone if arguments.pop("config_only", False) else LLM
    try:
        build(**arguments)
    except (PoolweaveError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)
    import vllm  # noqa: F401 - what takes longest

    children = []
    for case, arguments in json.loads(sys.argv[1]).items():
        child = os.fork()
        if not child:
            os.write(answers, (json.dumps({case: refusal(arguments)}) + "\n").encode())
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
