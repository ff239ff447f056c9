"""Pools whose HBM is a GPU's. What needs no GPU runs on a stand-in for the driver (ref_gpu.py)."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from ref_gpu import Nccl, bytes_at, one_gpu

from poolweave.errors import ConfigError, NotResident, OutOfBlocks
from poolweave.mempool import Arena, MemPool, PoolConfig
from poolweave.transfer import KVLayout, TransferConfig, nccl_lane
from poolweave.types import Tier

LAYOUT = KVLayout(num_layers=2, kv_heads=2, head_dim=16, dtype="float32")  # 8 KiB a block
MIB = 1 << 20


@pytest.fixture
def gpu() -> Iterator[Any]:
    with one_gpu(64 * MIB) as stand_in:
        yield stand_in


def on_host(pool: MemPool) -> npt.NDArray[np.generic]:
    """HBM as the host sees it, which only the stand-in's can be."""
    view = pool.view()
    address, _ = view.__cuda_array_interface__["data"]
    nbytes = view.shape[0] * pool.layout.block_bytes
    return pool.layout.view(np.frombuffer(bytes_at(address, nbytes), np.uint8), view.shape[0])


def fill(pool: MemPool, blocks: Any, seed: int) -> npt.NDArray[np.generic]:
    """Random KV in sealed blocks. -> a copy of it"""
    rows = pool.slots(blocks)
    kv = np.random.default_rng(seed).random((len(rows), *on_host(pool).shape[1:]), np.float32)
    on_host(pool)[rows] = kv
    pool.seal(blocks)
    return kv


@pytest.mark.parametrize("order", ["aggregated", "layered", "token_major"])
def test_a_view_is_an_array_on_the_device(gpu: Any, order: Any) -> None:
    layout = KVLayout(num_layers=2, kv_heads=2, head_dim=16, dtype="float32", order=order)
    with MemPool(layout, hbm="2MiB", device="cuda:0") as pool, MemPool(layout, hbm="2MiB") as host:
        view, like = pool.view(), host.view()
        assert view.shape[1:] == like.shape[1:]
        if order != "layered":
            assert view.strides == like.strides
        assert view.__dlpack_device__() == (2, 0)
        interface = view.__cuda_array_interface__
        assert (interface["shape"], interface["typestr"]) == (view.shape, "<f4")
        assert "dltensor" in repr(view.__dlpack__())
        assert gpu.stand_in_used() == 2 * MIB


@pytest.mark.usefixtures("gpu")
def test_blocks_move_to_dram_and_back_as_they_were() -> None:
    with MemPool(LAYOUT, hbm="2MiB", dram="2MiB", device="cuda") as pool:
        tokens = np.arange(64 * 16, dtype=np.int32)
        blocks = pool.alloc(64)
        kv = fill(pool, blocks, 1)
        pool.insert(tokens, blocks)
        pool.free(blocks)
        assert pool.swap_out(40) == 40
        on_host(pool)[: 2 * MIB // LAYOUT.block_bytes] = 0  # what has no memory faults
        with pool.match(tokens) as hit:
            away = np.flatnonzero(hit.tiers == Tier.DRAM.value)
            assert len(away) == 40
            with pytest.raises(NotResident):
                pool.slots(hit.blocks)
            rows = pool.slots(hit.blocks.array[away], Tier.DRAM)
            assert np.array_equal(pool.view(Tier.DRAM)[rows], kv[away])
            assert pool.swap_in(hit.blocks) == 40
            assert np.array_equal(on_host(pool)[pool.slots(hit.blocks)][away], kv[away])
        pool.check()


def test_pinned_dram_is_registered_with_the_device(gpu: Any) -> None:
    config = PoolConfig(pinned="require", max_dram="16MiB")
    with MemPool(LAYOUT, hbm="2MiB", dram="4MiB", device="cuda:0", config=config) as pool:
        assert pool.stats().tiers[Tier.DRAM].memory.pinned_bytes == 4 * MIB
        assert pool.stats().tiers[Tier.HBM].memory.pinned_bytes == 0
        pool.resize(dram="16MiB")
        assert gpu.stand_in_registered() == 16 * MIB
        pool.resize(dram="2MiB")
        assert gpu.stand_in_registered() == 2 * MIB
        pool.check()
    gc.collect()
    assert gpu.stand_in_registered() == 0


def test_resizing_takes_and_gives_the_devices_memory(gpu: Any) -> None:
    with MemPool(LAYOUT, hbm="8MiB", device="cuda:0", config=PoolConfig(max_hbm="48MiB")) as pool:
        pool.resize(hbm="32MiB")
        blocks = pool.alloc(32 * MIB // LAYOUT.block_bytes)
        assert gpu.stand_in_used() == 32 * MIB
        pool.free(blocks)
        pool.resize(hbm="4MiB")
        assert gpu.stand_in_used() == 4 * MIB
        with pytest.raises(OutOfBlocks):
            pool.alloc(32 * MIB // LAYOUT.block_bytes)
        pool.check()
    assert gpu.stand_in_used() == 0


def test_a_device_that_is_full_says_so_and_nothing_is_lost(gpu: Any) -> None:
    with MemPool(LAYOUT, hbm="40MiB", device="cuda:0") as pool, MemPool(LAYOUT, hbm="4MiB", device="cuda:0") as other:
        with pytest.raises(ConfigError, match="make hbm smaller"):
            other.resize(hbm="40MiB")
        assert other.stats().tiers[Tier.HBM].total == 4 * MIB // LAYOUT.block_bytes
        other.free(other.alloc(4))
        other.resize(hbm="8MiB")
        pool.check()
        other.check()
        with pytest.raises(ConfigError, match=r"hbm=\d+ bytes is more than device cuda:0's memory of 67108864 bytes"):
            MemPool(LAYOUT, hbm="128MiB", device="cuda:0")
    assert gpu.stand_in_used() == 0


@pytest.mark.usefixtures("gpu")
def test_what_a_device_cannot_be_is_refused() -> None:
    for wrong in ("gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1", "CUDA:0", "cuda:99999", ""):
        with pytest.raises(ConfigError, match="device"):
            MemPool(LAYOUT, hbm="2MiB", device=wrong)
    with pytest.raises(ConfigError, match="page_bytes"):
        MemPool(LAYOUT, hbm="2MiB", device="cuda:0", config=PoolConfig(page_bytes=64 << 10))
    with pytest.raises(ConfigError, match="give hbm a size"):
        MemPool(LAYOUT, hbm=Arena("4MiB"), device="cuda:0")
    with MemPool(LAYOUT, hbm="2MiB", device="cuda:0") as pool:
        with pytest.raises(ConfigError, match="cannot map"):
            pool.window()
        with pytest.raises(ConfigError, match="nccl"):
            MemPool(
                LAYOUT, hbm="2MiB", device="cuda:0", config=PoolConfig(transfer=TransferConfig(listen="shm"))
            ).connect("x", "shm://x")  # fmt: skip


@pytest.mark.usefixtures("gpu")
def test_two_pools_exchange_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_lane, "load_nccl", lambda: Nccl)
    monkeypatch.setattr(nccl_lane, "CHUNK_BYTES", 1 << 20)
    with MemPool(LAYOUT, hbm="4MiB", device="cuda:0") as one, MemPool(LAYOUT, hbm="4MiB", device="cuda:0") as other:
        one.connect(other.instance, other.address)
        tokens = np.arange(10 * 16, dtype=np.int32)
        blocks = one.alloc(10)
        kv = fill(one, blocks, 2)
        one.transfer_with_insert(other.instance, blocks, tokens).result(30)
        with other.match(tokens) as hit:
            assert hit.num_tokens == 160
            assert np.array_equal(on_host(other)[other.slots(hit.blocks)], kv)


def test_a_machine_without_a_driver_names_what_is_missing() -> None:
    """In a process of its own: this one may have the stand-in loaded."""
    program = (
        "from poolweave import MemPool, KVLayout\n"
        "from poolweave.errors import ConfigError\n"
        "try: MemPool(KVLayout(num_layers=1, kv_heads=1, head_dim=8), hbm='2MiB', device='cuda:7')\n"
        "except ConfigError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "is not available" in done.stdout
    assert "set device='cpu'" in done.stdout
