"""How long KV takes to another process here: sizes apart from numbers of calls, so that a fit can tell them apart."""

from __future__ import annotations

import time

from poolweave.mempool import MemPool
from poolweave.scheduler.cost_model import TransferSample
from poolweave.serving.bench.peer import Peer, PoolSpec
from poolweave.transfer import KVLayout

_BLOCKS = (1, 4, 16, 64)
_REPEATS = 5
_TIMEOUT_S = 120.0


def measure_transfers(layout: KVLayout, transport: str) -> tuple[TransferSample, ...]:
    """The quickest of several transfers of each size, from offer to confirm: of neighbouring blocks, which are one
    piece of memory, and of every second one, each a piece of its own. Raises what a transfer raises."""
    most = max(_BLOCKS)
    row_bytes = layout.num_layers * layout.block_tokens * layout.dtype_bytes
    spec = PoolSpec(
        layers=layout.num_layers, kv_heads=1, head_dim=layout.block_bytes // (2 * row_bytes),
        block_tokens=layout.block_tokens, dtype=layout.dtype, order="aggregated", num_blocks=2 * most,
        transport=transport, connections=1, checksums=True,
    )  # fmt: skip
    samples = []
    with Peer() as peer:
        ((instance, address),) = peer.open(spec)
        with spec.open() as pool:
            pool.view()[:] = 1
            pool.connect(instance, address)
            for step in (1, 2):
                samples += [_sample(pool, instance, count, step) for count in _BLOCKS]
    return tuple(samples)


def _sample(pool: MemPool, instance: str, count: int, step: int) -> TransferSample:
    handles = pool.alloc(count * step)
    chosen = handles.array[::step]
    pool.seal(chosen)
    seconds, nbytes = [], 0
    for _ in range(_REPEATS + 1):  # the first dials, and makes the checksums that the others reuse
        began = time.perf_counter()
        nbytes = pool.transfer(instance, chosen, tag=b"").result(_TIMEOUT_S).nbytes
        seconds.append(time.perf_counter() - began)
    pool.free(handles)
    return TransferSample(nbytes=nbytes, calls=1 if step == 1 else count, seconds=min(seconds[1:]))
