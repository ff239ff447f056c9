"""Assembly: a pool's BlockSpace out of its settings."""

from __future__ import annotations

from poolweave.errors import ConfigError
from poolweave.index import RadixIndex
from poolweave.mempool._native import BlockTable, Device
from poolweave.mempool.arena import Arena
from poolweave.mempool.config import PoolConfig
from poolweave.mempool.guests import Guests
from poolweave.mempool.handed import HandedBook
from poolweave.mempool.quotas import TenantBook
from poolweave.mempool.shared_tier import SharedTierMemory
from poolweave.mempool.space import DRAM, HBM, BlockSpace
from poolweave.mempool.tiers import TIERS, TierMemory, TierSize
from poolweave.transfer import KVLayout
from poolweave.types import parse_bytes


def build_space(
    layout: KVLayout, hbm: int | str | Arena, dram: int | str | Arena, config: PoolConfig, epoch: int,
    device: Device | None = None,
) -> BlockSpace:  # fmt: skip
    """Raises ConfigError for settings that do not go together."""
    sizes = {HBM: ("hbm", hbm, config.max_hbm), DRAM: ("dram", dram, config.max_dram)}
    tiers: dict[int, TierMemory] = {}
    for number, (name, size, most) in sizes.items():
        max_bytes = None if most is None else parse_bytes(most, f"max_{name}")
        mine = device if number == HBM else None
        if isinstance(size, Arena):
            if mine is not None:
                raise ConfigError(
                    "hbm=Arena(...) is host memory that pools share; on a device give hbm a size", setting="hbm"
                )
            max_bytes = max_bytes or size.stats().capacity_bytes
            tiers[number] = SharedTierMemory(
                TIERS[number], layout, TierSize(name, max_bytes, max_bytes, size.page_bytes), size
            )
        elif number == HBM or parse_bytes(size, name):
            tier_size = TierSize.of(name, parse_bytes(size, name), max_bytes, config.page_bytes, mine)
            tiers[number] = TierMemory(TIERS[number], layout, tier_size, config, device)
    if config.write == "through" and DRAM not in tiers:
        raise ConfigError('write="through" needs a DRAM tier; create the pool with dram=...', setting="write")
    limits = [tiers[number].num_slots if number in tiers else 0 for number in (HBM, DRAM)]
    table = BlockTable(limits[0], limits[1], epoch, layout.num_layers)
    index = RadixIndex(layout.block_tokens, eviction=config.eviction, keep_tenants=config.quotas is not None)
    book = None if config.quotas is None else TenantBook(config.quotas, table, layout.block_bytes)
    if book is not None:
        index.namespaces.add_holder(book)
    space = BlockSpace(layout, table, tiers, index, config.copy_threads, book)
    memory = tiers[HBM]
    if isinstance(memory, SharedTierMemory):
        space.guests = memory.guests = Guests(memory, table)
        space.handed = HandedBook(table, memory)
    if config.events is not None:
        from poolweave.mempool.announcer import announcer  # which needs ZeroMQ, other pools do not

        space.recorder = announcer(layout, config)
    return space
