"""What vLLM's configuration and tensors say, as values of this package. The one file that knows their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poolweave.errors import ModelUnsupported
from poolweave.index import Identity
from poolweave.integrations.vllm.identity import weights_identity
from poolweave.integrations.vllm.pages import PageFacts
from poolweave.integrations.vllm.worker_side import CacheLayer
from poolweave.transfer import KVLayout


def page_facts(vllm_config: Any, kv_cache_config: Any) -> PageFacts:
    """Of a VllmConfig and a KVCacheConfig."""
    groups = kv_cache_config.kv_cache_groups
    spec = groups[0].kv_cache_spec if groups else None
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    return PageFacts(
        model=model.model,
        device=vllm_config.device_config.device_type,
        kinds=tuple(type(group.kv_cache_spec).__name__ for group in groups),
        layers=len(groups[0].layer_names) if groups else 0,
        heads=getattr(spec, "num_kv_heads", 0),
        width=getattr(spec, "head_size", 0) + getattr(spec, "head_size_v", 0),
        block_tokens=getattr(spec, "block_size", 0),
        dtype=str(getattr(spec, "dtype", "none")).removeprefix("torch."),
        page_bytes=getattr(spec, "page_size_bytes", 0),
        inside=_inside(vllm_config, kv_cache_config, spec),
        window=getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None),
        ranks=parallel.world_size * parallel.decode_context_parallel_size,
        speculative=vllm_config.speculative_config is not None,
        encoder=bool(model.is_encoder_decoder),
    )


def base_identity(vllm_config: Any, layout: KVLayout, model_id: str | None) -> Identity:
    """Whose KV it is, but for what each request adds. `model_id` stands for the weights instead of a digest of them."""
    model = vllm_config.model_config
    name, revision = model_id or "", ""
    if model_id is None:
        config = model.hf_config.to_dict()
        name, revision = weights_identity(model.model, model.revision, config, vllm_config.load_config.load_format)
    dtype = f"{model.dtype}:{vllm_config.cache_config.cache_dtype}:{model.quantization}"
    return Identity(model=name, revision=revision, layout=layout.fingerprint(), dtype=dtype)


def cache_layers(tensors: Mapping[str, Any], kv_cache_config: Any, facts: PageFacts) -> dict[str, CacheLayer]:
    """The layers of vLLM's cache, in the model's order. Raises ModelUnsupported when pages do not lie one by one."""
    layers: dict[str, CacheLayer] = {}
    for name in kv_cache_config.kv_cache_groups[0].layer_names:
        tensor = tensors[name]
        stride = tensor.stride(0) * tensor.element_size()
        whole = tensor[0].is_contiguous() and tensor[0].nbytes == facts.page_bytes == stride
        if tensor.device.type != "cpu" or tensor.shape[0] != kv_cache_config.num_blocks or not whole:
            feature = (
                f"layer {name} keeps {tensor.shape[0]} pages of {tensor[0].nbytes} bytes every {stride} on "
                f"{tensor.device}, where {kv_cache_config.num_blocks} of {facts.page_bytes} side by side are supported"
            )
            raise ModelUnsupported(f"{facts.model}: {feature}", model=facts.model, feature=feature)
        layers[name] = CacheLayer(tensor.data_ptr(), tensor.shape[0], facts.page_bytes)
    return layers


def _inside(vllm_config: Any, kv_cache_config: Any, spec: Any) -> str:
    """How keys and values lie within a page: vLLM's layout and, on a CPU, the instruction set that packs them."""
    layout = str(kv_cache_config.kv_cache_layout)
    if vllm_config.device_config.device_type != "cpu" or spec is None:
        return layout
    from vllm.v1.attention.backends import cpu_attn

    isa = cpu_attn._get_attn_isa(
        vllm_config.model_config.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype
    )
    return f"{layout}-{isa}"
