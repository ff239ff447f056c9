"""Pools on real GPUs: `pytest -m gpu`. Each in a process of its own, since this one may have the stand-in loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.multiproc, pytest.mark.timeout(300)]

_MOVES = """
import numpy as np
from poolweave import KVLayout, MemPool, Tier
layout = KVLayout(num_layers=4, kv_heads=8, head_dim=64, order=ORDER)
with MemPool(layout, hbm="64MiB", dram="64MiB", device="cuda:0") as pool:
    blocks = pool.alloc(128, Tier.DRAM)
    rows = pool.slots(blocks, Tier.DRAM)
    kv = np.random.default_rng(1).random((128, *pool.view(Tier.DRAM).shape[1:])).astype(np.float16)
    pool.view(Tier.DRAM)[rows] = kv
    pool.seal(blocks)
    tokens = np.arange(128 * 16, dtype=np.int32)
    pool.insert(tokens, blocks)
    assert pool.swap_in(blocks) == 128
    pool.view(Tier.DRAM)[rows] = 0
    pool.free(blocks)
    assert pool.swap_out(128) == 128
    with pool.match(tokens) as hit:
        assert np.array_equal(pool.view(Tier.DRAM)[pool.slots(hit.blocks, Tier.DRAM)], kv)
    if ORDER == "aggregated":
        pool.resize(hbm="128MiB")
        pool.resize(hbm="8MiB")
    pool.check()
print("well")
"""

_TENSOR = """
import numpy as np
import torch
if not torch.cuda.is_available():
    print("skip: this torch has no CUDA")
    raise SystemExit
from poolweave import KVLayout, MemPool, Tier
with MemPool(KVLayout(num_layers=2, kv_heads=2, head_dim=64), hbm="8MiB", dram="8MiB", device="cuda:0") as pool:
    blocks = pool.alloc(16)
    kv = torch.from_dlpack(pool.view())
    rows = torch.from_numpy(pool.slots(blocks)).cuda().long()
    wanted = torch.rand(16, *kv.shape[1:], device="cuda").half()
    kv[rows] = wanted
    torch.cuda.synchronize()
    pool.seal(blocks)
    pool.insert(np.arange(256, dtype=np.int32), blocks)
    pool.free(blocks)
    pool.swap_out(16)
    with pool.match(np.arange(256, dtype=np.int32)) as hit:
        there = pool.view(Tier.DRAM)[pool.slots(hit.blocks, Tier.DRAM)]
    assert np.array_equal(there, wanted.cpu().numpy())
print("well")
"""

_PEER = """
import sys
import numpy as np
from poolweave import KVLayout, MemPool, Tier
from poolweave.transfer import TransferConfig
from poolweave.mempool import PoolConfig
from poolweave._core import Device
try:
    Device.open(1)
except Exception as error:
    print(f"skip: NCCL joins two GPUs: {error}")
    raise SystemExit
layout = KVLayout(num_layers=4, kv_heads=8, head_dim=64)
made = [MemPool(layout, hbm="64MiB", dram="64MiB", device=f"cuda:{n}") for n in (0, 1)]
one, other = made
one.connect(other.instance, other.address)
tokens = np.arange(128 * 16, dtype=np.int32)
blocks = one.alloc(128, Tier.DRAM)
kv = np.random.default_rng(1).random((128, *one.view(Tier.DRAM).shape[1:])).astype(np.float16)
one.view(Tier.DRAM)[one.slots(blocks, Tier.DRAM)] = kv
one.seal(blocks)
one.swap_in(blocks)
one.transfer_with_insert(other.instance, blocks, tokens).result(60)
assert other.swap_out(128) == 128
with other.match(tokens) as hit:
    assert np.array_equal(other.view(Tier.DRAM)[other.slots(hit.blocks, Tier.DRAM)], kv)
for pool in made:
    pool.close()
print("well")
"""

_DEVICE = "from poolweave._core import Device\nDevice.open(0)\n"


def on_a_gpu(program: str) -> None:
    """Skips where there is no GPU."""
    if subprocess.run([sys.executable, "-c", _DEVICE], capture_output=True, check=False).returncode:
        pytest.skip("no GPU")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    said = done.stdout.strip().splitlines()[-1:] or [""]
    if said[0].startswith("skip: "):
        pytest.skip(said[0][6:])
    assert (done.returncode, said[0]) == (0, "well"), done.stderr


@pytest.mark.parametrize("order", ["aggregated", "layered"])
def test_blocks_move_between_a_gpu_and_dram(order: str) -> None:
    on_a_gpu(f"ORDER = {order!r}\n{_MOVES}")


def test_torch_writes_where_the_pool_reads() -> None:
    on_a_gpu(_TENSOR)


def test_nccl_moves_a_prompt_between_two_gpus() -> None:
    on_a_gpu(_PEER)
