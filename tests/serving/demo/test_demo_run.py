"""`poolweave demo` as a user runs it, and the models that it makes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("gguf", reason="needs the demo extra")

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_demo_ends_with_all_that_it_claims(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from poolweave.serving.cli import main; main()", "demo", "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    for claim in ("are those of transformers", "what the token lists predict", "its KV went back", "prefill switched"):
        assert claim in " ".join(result.stdout.split())
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "demo.json").read_text())
    assert found["holds"]
    assert {row["model"] for row in found["requests"]} == {"mixtral", "qwen3", "deepseek"}
    assert len(found["requests"]) == 12


def test_the_upcycled_mixture_computes_what_smollm2_does() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from poolweave.serving.engine.smollm2 import smollm2_directory
    from poolweave.serving.engine.upcycled import upcycled_directory

    text = torch.arange(300, 340).unsqueeze(0)
    logits = []
    for folder in (smollm2_directory(), upcycled_directory()):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
        for weight in model.parameters():
            weight.data = weight.data.to(torch.bfloat16).to(torch.float32)  # as the mixture keeps them
        with torch.inference_mode():
            logits.append(model(text).logits)
    assert torch.equal(logits[0].argmax(-1), logits[1].argmax(-1))
    assert float((logits[0] - logits[1]).abs().max()) < 1e-3
