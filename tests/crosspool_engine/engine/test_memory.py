"""Worker processes' own memory: failed and ended activations leave none of a model's weights behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import pytest
import torch

from poolweave.crosspool_engine import DecodeEngine, EngineConfig, Serving
from poolweave.crosspool_engine.models.random_models import save_random_models
from poolweave.errors import ConfigError

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(900)]
FFN_BYTES = 6 * 16 * 3 * 512 * 256 * 4  # layers, experts, matrices


def own_bytes(engine: DecodeEngine) -> list[int]:
    return [psutil.Process(pid).memory_full_info().uss for pid in engine.worker_pids()]


def test_weights_of_models_that_failed_or_ended_are_given_back(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    good = Path(save_random_models(tmp_path, hidden=512, layers=6, only=("qwen3",))["qwen3"])
    bad = tmp_path / "bad"
    shutil.copytree(good, bad)
    weights = load_file(bad / "model.safetensors")
    last = [name for name in weights if "layers.5" in name and "down_proj" in name][-1]
    weights[last].view(-1)[0] = torch.nan
    save_file(weights, bad / "model.safetensors", metadata={"format": "pt"})
    with DecodeEngine(EngineConfig(kv_budget="8MiB")) as engine:
        with pytest.raises(ConfigError, match="NaN"):
            engine.activate("bad", Serving(path=str(bad)))  # the first load leaves a little of the allocator's
        before = own_bytes(engine)
        for _ in range(4):
            with pytest.raises(ConfigError, match="NaN"):
                engine.activate("bad", Serving(path=str(bad)))
            engine.activate("good", Serving(path=str(good)))
            assert own_bytes(engine)[1] - before[1] > FFN_BYTES * 0.9, "the FFN worker has its weights"
            engine.deactivate("good")
            grown = [now - then for now, then in zip(own_bytes(engine), before, strict=True)]
            assert max(grown) < FFN_BYTES // 30, "heap pages in part-use, no weights"


def peak_bytes(pid: int) -> int:
    """The most that was resident since `forget_peak`."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_activating_holds_one_copy_of_the_weights_and_one_tensor(tmp_path: Path, stored: str) -> None:
    """Also where each tensor is widened on its way."""
    path = save_random_models(tmp_path, hidden=512, layers=6, only=("qwen3",), dtype=stored)["qwen3"]
    with DecodeEngine(EngineConfig(kv_budget="8MiB", max_hidden=512)) as engine:
        attention, ffn = engine.worker_pids()
        for pid in (attention, ffn):
            forget_peak(pid)
        start = [peak_bytes(pid) for pid in (attention, ffn)]
        engine.activate("model", Serving(path=path))
        grown = [peak_bytes(pid) - at for pid, at in zip((attention, ffn), start, strict=True)]
    assert FFN_BYTES < grown[1] < FFN_BYTES + (16 << 20), "one expert, some pages of the allocator's and of libraries"
    largest = 2048 * 512 * 4  # the embedding
    whole = 2 * largest + 6 * 4 * (2 * 512 * 512 + 2 * 512 * 128)
    assert whole < grown[0] < whole + 2 * largest + (16 << 20)
