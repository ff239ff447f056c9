"""The wheel, built from the sdist, in an environment that has nothing else (C28)."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

QUICKSTART = """
import sys
import numpy as np
import poolweave
from poolweave import KVLayout, MemPool, Tier

assert "site-packages" in poolweave.__file__, poolweave.__file__
layout = KVLayout(num_layers=2, kv_heads=2, head_dim=8, dtype="float32")
with MemPool(layout, hbm="1MiB", dram="1MiB") as pool:
    tokens = list(range(40))
    blocks = pool.alloc(2, tier=Tier.HBM)
    pool.view(Tier.HBM)[pool.slots(blocks)] = 1.0
    pool.seal(blocks)
    pool.insert(tokens, blocks)
    pool.free(blocks)
    with pool.match(tokens) as hit:
        assert hit.num_tokens == 32, hit
    pool.check()
assert "torch" not in sys.modules
print("ok")
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command in `cwd` without this process's Python settings; -> its output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def clean_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment that holds the wheel and its base requirements only."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", ROOT, cwd=folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel, cwd=folder)
    return python


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_wheel_from_sdist_runs_the_quickstart_without_the_engine_extra(clean_python: Path, tmp_path: Path) -> None:
    """C36: nothing else is started or downloaded for it."""
    assert run(clean_python, "-c", QUICKSTART, cwd=tmp_path).strip() == "ok"
    installed = run(clean_python, "-m", "pip", "list", "--format=freeze", cwd=tmp_path)
    assert "torch" not in installed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_native_core_needs_no_gpu_or_verbs_library(clean_python: Path, tmp_path: Path) -> None:
    core = run(clean_python, "-c", "import poolweave._core as c; print(c.__file__)", cwd=tmp_path).strip()
    needed = run("ldd", core, cwd=tmp_path)
    assert "libc.so" in needed
    assert not [name for name in ("libcuda", "ibverbs", "rdmacm", "nccl") if name in needed]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_command_line_without_the_serve_extra_says_what_to_install(clean_python: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [clean_python.parent / "poolweave", "doctor"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "poolweave[serve]" in done.stderr
    assert "Traceback" not in done.stderr
