"""The oracle of the block table: one plain record a block and one a slot, everything counted by looking."""

from __future__ import annotations

from dataclasses import dataclass

LAYERS = 3


@dataclass
class RefBlock:
    tier: int
    slot: int
    tenant: int
    own: int = 1
    layers: int = 0
    indexed: bool = False
    private: bool = False
    loans: int = 0
    mirror: int | None = None

    @property
    def sealed(self) -> bool:
        return self.layers == LAYERS

    @property
    def evictable(self) -> bool:
        return self.indexed and not self.own and not self.loans


class TableOracle:
    """Slots are free, a block's, a mirror's, or in limbo with so many loans."""

    def __init__(self, limits: tuple[int, int], quota: int) -> None:
        self.limits = list(limits)
        self.quota = quota  # of tenant 1, in slots of tier 0
        self.blocks: dict[int, RefBlock] = {}
        self.limbo: dict[tuple[int, int], tuple[int, int]] = {}  # place -> loans, tenant

    def used(self, tier: int, tenant: int | None = None) -> set[int]:
        slots = {b.slot for b in self.blocks.values() if b.tier == tier and tenant in (None, b.tenant)}
        slots |= {slot for (t, slot), (_, owner) in self.limbo.items() if t == tier and tenant in (None, owner)}
        if tier == 1:
            slots |= {b.mirror for b in self.blocks.values() if b.mirror is not None and tenant in (None, b.tenant)}
        return slots

    def free(self, tier: int) -> list[int]:
        """Slots that can be given out, in order."""
        used = self.used(tier)
        room = max(0, self.limits[tier] - len(used))
        return [slot for slot in range(self.limits[tier]) if slot not in used][:room]

    def alloc_places(self, count: int, mask: int, tenant: int) -> list[tuple[int, int]] | None:
        """Where they would lie, or None."""
        places: list[tuple[int, int]] = []
        for tier in (0, 1):
            if mask >> tier & 1:
                free = self.free(tier)
                if tenant == 1 and tier == 0:
                    free = free[: max(0, self.quota - len(self.used(0, 1)))]
                places += [(tier, slot) for slot in free]
        return places[:count] if len(places) >= count else None

    def settle(self) -> None:
        """Blocks without references are gone; what is on loan stays in limbo."""
        for handle, block in list(self.blocks.items()):
            if not block.own and not block.indexed and not block.loans:
                del self.blocks[handle]

    def leave(self, block: RefBlock, loans_here: int) -> None:
        """The block moves away from its place, where `loans_here` loans go on."""
        if loans_here:
            self.limbo[block.tier, block.slot] = (loans_here, block.tenant)

    def counts(self, tier: int) -> dict[str, int]:
        here = [b for b in self.blocks.values() if b.tier == tier]
        used = self.used(tier)
        return {
            "limit": self.limits[tier],
            "used": len(used),
            "free": len(self.free(tier)),
            "historical": sum(b.evictable for b in here),
            "pinned": sum(b.indexed and not b.evictable for b in here),
            "limbo": sum(t == tier for t, _ in self.limbo),
            "overhang": sum(slot >= self.limits[tier] for slot in used),
            "mirrors": sum(b.mirror is not None for b in self.blocks.values()) if tier == 1 else 0,
        }
