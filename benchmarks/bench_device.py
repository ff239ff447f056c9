"""HBM on a GPU: swaps, mapping and checksums, as ratios to what the driver does alone in the same run.

    swap        blocks of 160 KiB between HBM and DRAM, of one copy of the same bytes in one piece
    map         growing and shrinking a tier, a page of 2 MiB
    checksums   XXH3 of blocks in HBM (through host memory), of the copy alone

Needs a GPU; says so and ends well without one.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from poolweave import KVLayout, MemPool, Tier
from poolweave._core import Device, DeviceBuffer, Grid, TierGeometry, Tiers
from poolweave.errors import ConfigError
from poolweave.mempool import Arena, PoolConfig

LAYOUT = KVLayout(num_layers=20, kv_heads=2, head_dim=64)  # 160 KiB a block
NUM_BLOCKS = 4096
ROUNDS = 7


def seconds(do: Callable[[], object]) -> float:
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        do()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def swaps(device: Device) -> None:
    slots = np.arange(NUM_BLOCKS, dtype=np.int32)
    nbytes = NUM_BLOCKS * LAYOUT.block_bytes
    buffer, host = DeviceBuffer(device, nbytes), np.ones(nbytes, np.uint8)
    there = TierGeometry(buffer.address, LAYOUT.block_bytes, LAYOUT.plane_bytes)
    here = TierGeometry(host.ctypes.data, LAYOUT.block_bytes, LAYOUT.plane_bytes)
    scattered = np.random.default_rng(0).permutation(slots).astype(np.int32)
    arena = Arena(nbytes, copied_by=device, pinned="prefer")
    pinned = arena.reserve(nbytes, sole=True)
    pinned.map(0, pinned.num_pages)
    registered = TierGeometry(pinned.address, LAYOUT.block_bytes, LAYOUT.plane_bytes)
    for kind, host_side in (("pinned", registered), ("plain", here)):
        for name, source, target in (("out", there, host_side), ("in", host_side, there)):
            whole = seconds(lambda s=source, t=target: device.swap_blocks(s, t, slots, slots, *planes()))
            single = seconds(lambda s=source, t=target: device.swap_blocks(s, t, slots, scattered, *planes()))
            print(f"swap {name:3} {kind:6} {nbytes / single / 1e9:7.1f} GB/s   {whole / single:5.2f} of one piece")
    grid = Grid(
        base=buffer.address, nbytes=nbytes, slot_stride=LAYOUT.block_bytes, plane_stride=LAYOUT.plane_bytes,
        row_stride=LAYOUT.row_bytes, row_bytes=LAYOUT.row_bytes, num_slots=NUM_BLOCKS, num_planes=LAYOUT.num_planes,
        num_rows=LAYOUT.block_tokens,
    )  # fmt: skip
    extents = Tiers([1], [grid]).extents(np.ones(NUM_BLOCKS, np.uint8), slots)
    hashes = np.empty(NUM_BLOCKS, np.uint64)
    summed = seconds(lambda: device.hash_blocks(extents, 0, hashes))
    copied = seconds(lambda: device.swap_blocks(there, here, slots, slots, *planes()))
    print(f"checksums {nbytes / summed / 1e9:7.1f} GB/s   {copied / summed:5.2f} of the copy")


def planes() -> tuple[int, int]:
    return LAYOUT.num_planes, LAYOUT.plane_bytes


def maps(device: Device) -> None:
    pages = 256
    most = pages * device.granularity
    config = PoolConfig(max_hbm=most, page_bytes=device.granularity)
    with MemPool(LAYOUT, hbm=device.granularity, device=f"cuda:{device.ordinal}", config=config) as pool:
        began = time.perf_counter()
        pool.resize(hbm=most)
        grown = time.perf_counter()
        pool.resize(hbm=device.granularity)
        shrunk = time.perf_counter()
        assert pool.stats().tiers[Tier.HBM].mapped_bytes >= device.granularity
    print(f"map {1e6 * (grown - began) / pages:7.1f} us a page, unmap {1e6 * (shrunk - grown) / pages:7.1f}")


def main() -> int:
    try:
        device = Device.open(0)
    except ConfigError as error:
        print(f"no GPU here: {error}")
        return 0
    print(f"cuda:{device.ordinal}: {device.total_bytes / 2**30:.1f} GiB, pages of {device.granularity >> 20} MiB")
    swaps(device)
    maps(device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
