"""
Native core of poolweave: arenas, blocks, the radix tree, copies and streams.
"""

import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, overload

import numpy
import numpy.typing
from numpy.typing import NDArray

class ArenaStats:
    """What an arena has, in bytes."""

    @property
    def page_bytes(self) -> int: ...
    @property
    def capacity_bytes(self) -> int: ...
    @property
    def budget_bytes(self) -> int: ...
    @property
    def held_bytes(self) -> int: ...
    @property
    def kept_bytes(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def processes(self) -> int: ...
    @property
    def huge_pages(self) -> bool: ...
    @property
    def pinned_bytes(self) -> int: ...
    @property
    def guest_bytes(self) -> int: ...
    @property
    def orphan_bytes(self) -> int: ...

class Want(enum.Enum):
    """Whether a kind of memory is asked for."""

    OFF = 0

    PREFER = 1

    REQUIRE = 2

class Arena:
    """Physical pages under a byte budget."""

    @staticmethod
    def create(
        capacity_bytes: int, budget_bytes: int, page_bytes: int, huge_pages: Want = Want.OFF, pinned: Want = Want.OFF
    ) -> Arena: ...
    @staticmethod
    def attach(data_fd: int, ledger_fd: int, pinned: Want = Want.OFF) -> Arena:
        """Join another process's arena; both are duplicated."""

    def set_budget(self, nbytes: int) -> None: ...
    def trim(self) -> int:
        """Return the memory of all free pages to the system. -> bytes"""

    def reap(self) -> int:
        """Free what dead processes held. -> bytes"""

    def stats(self) -> ArenaStats: ...
    def check(self) -> None: ...
    def readonly_fd(self) -> int:
        """The memory opened read-only; the arena owns the descriptor."""

    @property
    def member(self) -> tuple[int, int, int]:
        """
        This registration as take_guests() of others names it: (pid, start, place).
        """

    @property
    def id(self) -> int:
        """Names the arena to its members."""

    def departures(self) -> int:
        """How often a page lost its last guest."""

    @property
    def data_fd(self) -> int: ...
    @property
    def ledger_fd(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...

class Range:
    """Reserved address space into which an arena's pages are mapped."""

    def __init__(self, arena: Arena, nbytes: int, sole: bool = False, guest_bytes: int = 0) -> None: ...
    def map(self, first: int, count: int) -> None: ...
    def unmap(self, first: int, count: int) -> None: ...
    def ensure(self, first: int, count: int) -> None:
        """Map those of the pages that are not."""

    def drop(self, first: int, count: int) -> None:
        """Unmap those of the pages that are mapped."""

    def page_at(self, index: int) -> int:
        """The arena page behind page `index`, or -1."""

    def take_guests(
        self,
        lender: tuple[int, int, int],
        rows: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        block_bytes: int,
        shift: int,
        table: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> bool:
        """Map blocks of another range here, read-only; False when it is gone."""

    def drop_guests(
        self,
        rows: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        block_bytes: int,
    ) -> None: ...
    def have_guests(
        self,
        rows: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        block_bytes: int,
        out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
    ) -> None:
        """1 for each block in whose pages others read."""

    @property
    def table_fd(self) -> int: ...
    def num_mapped_from(self, first: int) -> int: ...
    def check(self) -> None: ...
    def buffer(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """The whole span as uint8[nbytes]; zeros where nothing is mapped."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def num_mapped(self) -> int: ...
    @property
    def sole(self) -> bool: ...

class Blocks:
    """
    Handles of blocks in token order. A value: it owns no references, whoever was given it does.

    `owner` is the epoch of the pool they came from (0: not known), so that a pool can refuse blocks of
    another one. Indexing gives a handle, slicing and `+` give Blocks.
    """

    def __init__(
        self,
        array: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        owner: int = 0,
    ) -> None:
        """A copy of a uint64 array."""

    @staticmethod
    def of(handles: Iterable[int], owner: int = 0) -> Blocks:
        """
        From integers. Raises TypeError for what is none, OverflowError for negative ones.
        """

    @staticmethod
    def empty() -> Blocks: ...
    @property
    def array(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]:
        """The handles as uint64[n], without a copy."""

    @property
    def owner(self) -> int: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...
    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Blocks: ...
    def __add__(self, other: Blocks) -> Blocks: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    def __repr__(self) -> str: ...

class EvictFilter:
    """Which payloads an index may give up."""

class EvictableBlocks(EvictFilter):
    pass

class TierCounts:
    """Slots of one tier."""

    @property
    def limit(self) -> int: ...
    @property
    def free(self) -> int: ...
    @property
    def used(self) -> int: ...
    @property
    def historical(self) -> int: ...
    @property
    def pinned(self) -> int: ...
    @property
    def leased(self) -> int: ...
    @property
    def limbo(self) -> int: ...
    @property
    def reserved(self) -> int: ...
    @property
    def overhang(self) -> int: ...
    @property
    def mirrors(self) -> int: ...

class TenantCounts:
    """Slots of one tenant, and its limits, by tier."""

    @property
    def used(self) -> list[int]: ...
    @property
    def historical(self) -> list[int]: ...
    @property
    def limit(self) -> list[int]: ...
    @property
    def blocks(self) -> int: ...
    @property
    def block_limit(self) -> int: ...

class BlockTable:
    """
    References, places and states of blocks; each call is atomic over its batch.
    """

    def __init__(self, hbm: int, dram: int, epoch: int = 0, num_layers: int = 1) -> None: ...

    SEALED: int = 1

    INDEXED: int = 2

    PRIVATE: int = 4

    def alloc(
        self,
        out: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu")],
        mask: int,
        tenant: int = 0,
    ) -> bool: ...
    def alloc_blocks(self, arg0: int, arg1: int, /) -> Blocks | None:
        """
        (num_blocks, mask): alloc() as Blocks; None when there are too few, or num_blocks is negative.
        """

    def free_blocks(self, arg: Blocks, /) -> int:
        """
        (blocks): free() of Blocks; throws kUnknownBlock for those of another table.
        """

    def free(
        self, handles: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)]
    ) -> int: ...
    def retain(
        self, handles: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)]
    ) -> None: ...
    def seal(
        self, handles: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)]
    ) -> None: ...
    def seal_layers(
        self,
        handles: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        first: int,
        last: int,
    ) -> None: ...
    def sealed_layers(
        self,
        handles: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        out: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu")],
    ) -> None:
        """How many layers of each are sealed, from the first on."""

    def set_private(
        self, handles: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)]
    ) -> None: ...
    def check_insertable(
        self, handles: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)]
    ) -> int: ...
    def index(
        self, handles: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)]
    ) -> None: ...
    def unindex(
        self, handles: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)]
    ) -> int: ...
    def lend(
        self,
        handles: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        tiers: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu")],
        unsealed: bool = False,
        base: int = 0,
    ) -> None:
        """
        Tiers are given by their numbers plus `base`: numpy takes ten times as long to add that.
        """

    def give_back(
        self,
        handles: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        tiers: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        base: int = 0,
    ) -> int: ...
    def locate(
        self,
        handles: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        tiers: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu")],
    ) -> None: ...
    def slots(
        self,
        handles: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        tier: int,
        out: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu")],
    ) -> None: ...
    def flags(
        self,
        handles: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
    ) -> None: ...
    def begin_move(
        self,
        handles: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        tier: int,
        tiers: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu")],
        to: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu")],
    ) -> bool: ...
    def commit_move(
        self,
        handles: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        tier: int,
        to: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> int: ...
    def abort_move(
        self,
        handles: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        tier: int,
        to: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> int: ...
    def set_limit(self, tier: int, limit: int) -> None: ...
    def evictable_overhang(self, tier: int) -> list[int]: ...
    def overhang(self, tier: int) -> list[int]: ...
    def used_end(self, tier: int) -> int: ...
    def counts(self, tier: int) -> TierCounts: ...
    def longest_free_run(self, tier: int) -> int: ...
    @property
    def num_live(self) -> int: ...
    def evictable(self, mask: int) -> EvictableBlocks:
        """
        The blocks in these tiers that only the index refers to, as a filter for the index.
        """

    def is_evictable(self, handle: int, mask: int) -> bool: ...
    def check(self) -> None: ...
    def set_tenants(self, count: int) -> None: ...
    def set_quota(self, tenant: int, hbm: int, dram: int, blocks: int) -> None:
        """Limits in slots; 2**64 - 1 is none."""

    def tenant(self, tenant: int) -> TenantCounts: ...
    def alloc_room(self, mask: int, tenant: int = 0) -> int:
        """How many blocks alloc() could give now."""

    def tenant_room(self, tenant: int, mask: int) -> int:
        """How many more blocks it may have in these tiers."""

    def tenants_of(
        self,
        handles: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        out: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu")],
    ) -> None: ...
    def fit_quotas(
        self,
        handles: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        tier: int,
        out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
    ) -> None:
        """
        1 for each block that its tenant's limits let lie in the tier, taken in order.
        """

    GUESTS: int = 2

    def set_guests(self, base: int, count: int) -> None:
        """Guests may lie at slots [base, base + count)."""

    def adopt(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        out: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu")],
        fresh: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
    ) -> int:
        """
        Blocks where guests were taken, one reference each. -> how many, from the first on.
        """

    def take_departed(self) -> list[int]:
        """Slots that guests have left since the last call."""

    @property
    def has_departed(self) -> bool: ...
    def begin_mirrors(
        self,
        handles: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        chosen: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu")],
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu")],
        to: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu")],
    ) -> int:
        """-> how many of them get a second copy."""

    def end_mirrors(
        self,
        chosen: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        to: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        commit: bool,
    ) -> int: ...
    def demote_mirrored(
        self, handles: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)]
    ) -> list[int]:
        """-> those that have no mirror."""

    def drop_mirrors(self, count: int, from_slot: int = 0, tenant: int = 0) -> int: ...

class TierGeometry:
    """Where the planes of a tier's blocks lie."""

    def __init__(self, base: int, slot_stride: int, plane_stride: int) -> None: ...

def swap_blocks(
    source: TierGeometry,
    target: TierGeometry,
    from_slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    to_slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    num_planes: int,
    plane_bytes: int,
    threads: int,
) -> None: ...
def swap_planes(
    sources: Sequence[TierGeometry],
    targets: Sequence[TierGeometry],
    from_slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    to_slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    plane_bytes: int,
    threads: int,
) -> None: ...

class MissReason(enum.Enum):
    """Why a lookup stopped where it did."""

    NONE = 0
    """Nothing is missing."""

    NEVER_STORED = 1
    """Nobody inserted it, or so long ago that it is forgotten."""

    EVICTED = 2
    """Dropped to make room."""

    EXPIRED = 3
    """Not used for the time to live."""

    DELETED = 4
    """Deleted or cleared by its owner."""

    OTHER_IDENTITY = 5
    """Its first block is stored, but under another namespace."""

    INSTANCE_GONE = 6
    """Its holder died or left."""

    IN_FLIGHT = 7
    """Announced, not arrived yet."""

    TIMEOUT = 8
    """Asked for, did not come in time."""

class Match:
    """
    The longest indexed prefix of a prompt. A pinned one keeps its path until it is closed.
    """

    @property
    def num_tokens(self) -> int:
        """Whole blocks only."""

    @property
    def blocks(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,), writable=False)]:
        """Payloads in prompt order, uint64, read-only."""

    @property
    def miss_reason(self) -> MissReason:
        """
        Why the block after the last one is not here; NONE when every whole block matched.
        """

    @property
    def pinned(self) -> bool: ...
    def close(self) -> None:
        """Gives the pin back; harmless twice."""

    def __enter__(self) -> Match: ...
    def __exit__(self, *args: object) -> None: ...
    def __repr__(self) -> str: ...

class Inserted:
    """What became of the blocks given to insert()."""

    @property
    def num_tokens(self) -> int:
        """
        Tokens indexed along this path now; fewer than given only under a byte cap.
        """

    @property
    def num_new(self) -> int:
        """
        Blocks that the index took by this call: the last ones of those now indexed.
        """

    @property
    def duplicates(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,), writable=False)]:
        """
        Given payloads that were not taken, since these blocks were indexed already: they stay the caller's.
        """

    @property
    def surplus(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,), writable=False)]:
        """
        Those duplicates for which the index holds another payload: second copies, to be freed.
        """

    @property
    def evicted(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,), writable=False)]:
        """
        Payloads that the index gave up, to stay under its caps or because their time to live was over.
        """

    def __repr__(self) -> str: ...

class RadixStats:
    """A snapshot of a radix tree's sizes and counters."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def num_namespaces(self) -> int: ...
    @property
    def pinned_blocks(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def lookups(self) -> int: ...
    @property
    def asked_blocks(self) -> int: ...
    @property
    def hit_blocks(self) -> int: ...
    @property
    def hit_rate(self) -> float:
        """Whole blocks found among those looked up."""

    @property
    def inserted_blocks(self) -> int: ...
    @property
    def duplicate_blocks(self) -> int: ...
    @property
    def refused_blocks(self) -> int: ...
    @property
    def misses(self) -> dict[MissReason, int]: ...
    @property
    def gone(self) -> dict[MissReason, int]: ...

class RecomputeCost:
    """What losing a block costs; see index/eviction.py."""

    def __init__(
        self, seconds_per_token: float = 1.0, seconds_per_context_token: float = 0.0, bytes_per_token: float = 1.0
    ) -> None: ...
    @property
    def seconds_per_token(self) -> float: ...
    @property
    def seconds_per_context_token(self) -> float: ...
    @property
    def bytes_per_token(self) -> float: ...

def eviction_policies() -> list[str]:
    """The names of all policies."""

class RadixTree:
    """
    An exact prefix index from int32 tokens to uint64 payloads. Thread-safe.
    """

    def __init__(
        self,
        block_tokens: int = 16,
        *,
        max_bytes: int = 0,
        max_tenant_bytes: int = 0,
        ttl_ns: int = 0,
        seed: int = 0,
        eviction: str = "lru",
        cost: RecomputeCost | None = None,
        keep_tenants: bool = False,
    ) -> None: ...
    @property
    def eviction(self) -> str:
        """The name of the policy."""

    def set_tenant(self, ns: int, tenant: int) -> bool: ...
    def forget(self, namespaces: Sequence[int]) -> list[int]:
        """Those of these that hold nothing; nothing is kept of them."""

    def tenant_bytes(self, ns: int) -> int: ...
    def stats(self) -> RadixStats: ...
    def check(self) -> str:
        """
        What is wrong with the tree's invariants; empty when nothing is. O(tree).
        """

    @property
    def block_tokens(self) -> int: ...
    def __len__(self) -> int:
        """Blocks indexed."""

    def match(
        self, tokens: NDArray[numpy.int32], ns: int = 0, pin: bool = False, touch: bool = True, now_ns: int = 0
    ) -> Match: ...
    def match_many(
        self, prompts: list[NDArray[numpy.int32]], ns: int = 0, touch: bool = True, now_ns: int = 0
    ) -> list[Match]: ...
    def insert(
        self,
        tokens: NDArray[numpy.int32],
        payloads: NDArray[numpy.uint64],
        ns: int = 0,
        priority: int = 0,
        now_ns: int = 0,
    ) -> Inserted: ...
    def delete(
        self, tokens: NDArray[numpy.int32], ns: int = 0, filter: EvictFilter | None = None
    ) -> NDArray[numpy.uint64]:
        """
        Blocks that only this prompt needs, given up from its end upward; pinned and not evictable ones stay.
        """

    def mark(self, tokens: NDArray[numpy.int32], ns: int, reason: MissReason) -> None:
        """Later misses at blocks of this prompt report this reason."""

    def evict(self, num_blocks: int, filter: EvictFilter | None = None) -> NDArray[numpy.uint64]:
        """
        Up to num_blocks payloads given up, lowest priority first, in the policy's order, leaves from their ends.
        """

    def coldest(self, num_blocks: int, filter: EvictFilter | None = None) -> NDArray[numpy.uint64]:
        """The payloads that evict would come to first; nothing is removed."""

    def evict_tenant(self, ns: int, num_blocks: int, filter: EvictFilter | None = None) -> NDArray[numpy.uint64]:
        """
        evict() among the blocks of the tenant of `ns`, least recently used first.
        """

    def coldest_tenant(self, ns: int, num_blocks: int, filter: EvictFilter | None = None) -> NDArray[numpy.uint64]:
        """
        coldest() among the blocks of the tenant of `ns`, least recently used first.
        """

    def expire(self, now_ns: int) -> NDArray[numpy.uint64]:
        """Payloads that were not touched for the time to live."""

    def clear(self, ns: int, reason: MissReason) -> NDArray[numpy.uint64]:
        """Everything of one namespace that is not pinned."""

    def clear_all(self, reason: MissReason) -> NDArray[numpy.uint64]:
        """Everything that is not pinned."""

class BlockCatalogue:
    """
    An index and a table in step. The caller holds the pool's lock in every call.
    """

    def __init__(self, table: BlockTable, tree: RadixTree) -> None: ...
    def match(self, tokens: NDArray[numpy.int32], ns: int) -> Match:
        """
        The longest indexed prefix, with one reference on each block for the caller.
        """

    def insert(self, tokens: NDArray[numpy.int32], blocks: NDArray[numpy.uint64], ns: int) -> Inserted:
        """Index the whole blocks of tokens that `blocks` has; atomic."""

    def place(
        self,
        tokens: NDArray[numpy.int32] | None,
        ns: int,
        mask: int,
        tenant: int,
        handles: NDArray[numpy.uint64],
        tiers: NDArray[numpy.uint8],
        slots: NDArray[numpy.int32],
    ) -> tuple[int, bool]:
        """
        Fill `handles` with blocks that are here already and fresh ones, one reference on each for the caller, and
        the rest with the Tier values and slots of the fresh ones. Returns how many were here, and False when no
        room was found for the fresh ones: then there are none. No `mask` allocates nothing.
        """

    def commit(
        self,
        held: NDArray[numpy.uint64],
        fresh: NDArray[numpy.uint64],
        num_whole: int,
        tokens: NDArray[numpy.int32] | None,
        ns: int,
        private: bool,
    ) -> Inserted:
        """
        They came: seal the full ones of fresh, and index all full ones by tokens, if given.
        """

class Intake:
    """
    Takes small offers in out of a peer's mapped memory. The caller holds the pool's lock.
    """

    def __init__(self, catalogue: BlockCatalogue, ours: Tiers, theirs: Tiers, words: NDArray[numpy.uint64]) -> None: ...
    def take(
        self,
        tokens: bytes,
        ns: int,
        num_whole: int,
        mask: int,
        number: int,
        tiers: bytes,
        slots: bytes,
        checksums: bytes,
        keep: bool,
        release: bool,
    ) -> tuple[bool, int, int, int, NDArray[numpy.uint64] | None]:
        """
        (done, available, num_held, num_calls, blocks): match, pin, allocate, copy while the word of `number` stands,
        check, seal and index. Not done: nothing is left of it. `keep`: the blocks, with the caller's references,
        else none are left. `available` blocks became free or evictable. `release` lets others have the GIL.
        """

    def take_message(
        self, message: bytes, identity: bytes, ns: int, block_tokens: int, most_blocks: int, most_held: int
    ) -> tuple[bool, int, int, int, int] | None:
        """
        (done, available, num_pulled, num_calls, number) of an offer without a tag, as take() of it read out of its
        message; None for any other message, or another identity. Over `most_held` blocks others have the GIL.
        """

def chained_keys(tokens: NDArray[numpy.int32], block_tokens: int, parent: bytes) -> NDArray[numpy.uint8]:
    """Chained 128-bit keys of the whole blocks of int32 tokens."""

def kv_event_scope(adapter: str | None, salt: str | None) -> bytes:
    """The scope of an adapter and a salt."""

class EventReport:
    """What one batch of KV events did, in blocks."""

    @property
    def timestamp(self) -> float: ...
    @property
    def stored(self) -> int:
        """Newly held."""

    @property
    def repeated(self) -> int:
        """Held already."""

    @property
    def removed(self) -> int:
        """No longer held."""

    @property
    def unknown(self) -> int:
        """Removed, but not held."""

    @property
    def orphans(self) -> int:
        """Stored after a parent that is not held: not credited."""

    @property
    def doubtful(self) -> int:
        """
        Removed once after several stores: no longer credited, perhaps still there.
        """

    @property
    def conflicts(self) -> int:
        """A hash in use for another block: not credited."""

    @property
    def skipped(self) -> int:
        """Of another block size, or without plain tokens."""

    @property
    def refused(self) -> int:
        """Above the source's max_blocks."""

    @property
    def clears(self) -> int:
        """AllBlocksCleared events."""

    @property
    def several_groups(self) -> bool:
        """The source keeps several cache groups."""

class EventIndexStats:
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_entries(self) -> int:
        """(source, block) pairs."""

    @property
    def num_sources(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class NativeEventIndex:
    """Which sources hold which blocks, as told by KV events. Thread-safe."""

    def __init__(self, block_tokens: int) -> None: ...
    def add_source(self, counts_copies: bool, max_blocks: int, credited_media: int) -> int: ...
    def drop_source(self, source: int) -> None: ...
    def set_trusted(self, source: int, trusted: bool) -> None: ...
    def clear(self, source: int) -> None: ...
    def apply(self, source: int, payload: bytes) -> EventReport:
        """
        Applies one msgpack batch. Raises EventsMalformed and changes nothing when it is none.
        """

    def match(self, tokens: NDArray[numpy.int32], scope: bytes, extra_keys: Sequence[bytes]) -> NDArray[numpy.int32]:
        """
        Leading blocks that each slot holds; 0 for sources that are not trusted.
        """

    def inventory(
        self, source: int
    ) -> list[tuple[int | None, int, bytes, NDArray[numpy.uint64], NDArray[numpy.int32]]]:
        """
        Runs of (parent, media, scope, hashes, tokens) that a source holds, parents first.
        """

    def num_held(self, source: int) -> int: ...
    def stats(self) -> EventIndexStats: ...
    def check(self) -> str:
        """What is wrong; empty when nothing is."""

    @property
    def block_tokens(self) -> int: ...

class NativeEventStream:
    """
    One source's batches in order. One owner; the counters may be read by any thread.
    """

    def __init__(self, index: NativeEventIndex, source: int) -> None: ...
    def follow(self, payload: bytes) -> EventReport | None:
        """
        Applies the next batch; None when all went as told. Raises EventsMalformed and then applies nothing.
        """

    def followed(self, sequence: int, payload: bytes) -> bool:
        """
        Whether the batch under this number was exactly this one, as far as it is remembered.
        """

    def begin_anew(self, sequence: int) -> None:
        """Forgets all that the source holds and told."""

    def set_trusted(self, trusted: bool) -> None: ...
    @property
    def next_sequence(self) -> int: ...
    @property
    def num_batches(self) -> int:
        """Those given to follow(), malformed ones too."""

class Grid:
    """Memory of one tier as slots x planes x rows, by strides."""

    def __init__(
        self,
        *,
        base: int,
        nbytes: int,
        slot_stride: int,
        plane_stride: int,
        row_stride: int,
        row_bytes: int,
        num_slots: int,
        num_planes: int,
        num_rows: int,
    ) -> None: ...

class Window:
    """The planes and the bytes of each row that move."""

    def __init__(self, first_plane: int, num_planes: int, row_offset: int, row_bytes: int) -> None: ...

class Extents:
    """
    The runs of memory of a list of blocks, in canonical order; does not own them.
    """

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_runs(self) -> int: ...
    @property
    def num_coalesced(self) -> int: ...
    def read_runs(self, out: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu")]) -> None:
        """Address and bytes of each run, one after the other."""

    @property
    def block_bytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class Tiers:
    """The grids of one instance by tier."""

    def __init__(self, names: Sequence[int], grids: Sequence[Grid]) -> None: ...
    def extents(
        self,
        tiers: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        windows: Sequence[Window] = [],
    ) -> Extents: ...

class Abort:
    """Ends a copy or a pull from another thread."""

    def __init__(self) -> None: ...
    def set(self) -> None: ...
    @property
    def is_set(self) -> bool: ...

class Outcome(enum.Enum):
    DONE = 0

    REVOKED = 1

    ABORTED = 2

def copy_blocks(
    source: Extents,
    target: Extents,
    first: int,
    count: int,
    threads: int,
    words: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
    index: int,
    lease: int,
    abort: Abort,
    hashes: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu")] | None = None,
) -> Outcome:
    """Copy blocks while words[index] holds `lease`."""

def hash_blocks(
    extents: Extents,
    first: int,
    threads: int,
    hashes: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu")],
) -> None:
    """XXH3-64 of each block, one for each place of `hashes`."""

def store_word(
    words: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu")], index: int, value: int
) -> None:
    """
    Store a lease word so that no later write of this process is seen before it.
    """

class Device:
    """One GPU by its primary context."""

    @staticmethod
    def open(ordinal: int) -> Device: ...
    @property
    def ordinal(self) -> int: ...
    @property
    def granularity(self) -> int:
        """Bytes: page sizes are multiples of it."""

    @property
    def total_bytes(self) -> int: ...
    @property
    def free_bytes(self) -> int: ...
    def arena(self, capacity_bytes: int, budget_bytes: int, page_bytes: int) -> Arena: ...
    def host_arena(
        self, capacity_bytes: int, budget_bytes: int, page_bytes: int, huge_pages: Want, pinned: Want
    ) -> Arena:
        """
        As Arena.create(); pinned is registered with the device, which then copies without buffers between.
        """

    def swap_blocks(
        self,
        source: TierGeometry,
        target: TierGeometry,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        to: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        num_planes: int,
        plane_bytes: int,
    ) -> None:
        """As swap_blocks(), where one of them is the device's."""

    def gather(self, extents: Extents, begin: int, end: int, staged: int) -> None:
        """Bytes of blocks laid one after the other to an address."""

    def scatter(self, extents: Extents, begin: int, end: int, staged: int) -> None:
        """Back from there."""

    def hash_blocks(
        self,
        extents: Extents,
        first: int,
        hashes: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu")],
    ) -> None:
        """As hash_blocks(), through host memory."""

    def make_stream(self) -> int:
        """-> its handle, to be dropped."""

    def drop_stream(self, stream: int) -> None: ...
    def is_idle(self, stream: int) -> bool:
        """Whether all that was enqueued is done; raises what failed."""

class CurrentDevice:
    """
    The device's context is current on this thread while one of these lives.
    """

    def __init__(self, device: Device) -> None: ...

class DeviceBuffer:
    """Memory of a device."""

    def __init__(self, device: Device, nbytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

def device_array(
    address: int, ordinal: int, shape: Sequence[int], strides: Sequence[int], code: int, bits: int, keep: object
) -> object:
    """Memory of a device for DLPack; `keep` lives as long as it does."""

class Wire:
    """Owns a connected socket of the data plane."""

    def __init__(self, fd: int) -> None: ...
    def shut_down(self) -> None: ...

class StreamServer:
    """The sender's side of the data plane."""

    def __init__(self, stall_s: float, idle_s: float) -> None: ...
    def publish(self, offer: int, nonce: int, extents: Extents, lifetime_s: float) -> None:
        """Copies `extents`; its memory must outlive the offer."""

    def revoke(self, offer: int) -> None: ...
    def adopt(self, fd: int) -> None: ...
    def close(self) -> None: ...
    @property
    def num_connections(self) -> int: ...
    @property
    def bytes_sent(self) -> int: ...

class Pull:
    """Which blocks of which offer to ask for."""

    def __init__(self, *, offer: int, nonce: int, first_block: int, chunk_bytes: int) -> None: ...

def pull_blocks(
    wires: Sequence[Wire],
    pull: Pull,
    target: Extents,
    stall_s: float,
    timeout_s: float,
    abort: Abort,
    hashes: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu")] | None = None,
) -> Outcome:
    """Receive the blocks of `target` over all `wires` at once."""

GREETING_LIMIT: int = 65536

FRAME_LIMIT: int = 33554432

class FrameEncoder:
    """Turns payloads into frames; one for each direction of a connection."""

    def __init__(self, key: bytes | None = None) -> None: ...
    def encode(self, payload: bytes) -> bytes:
        """Raises ProtocolError for a payload over FRAME_LIMIT."""

class FrameDecoder:
    """Turns received bytes into payloads, whatever the pieces they come in."""

    def __init__(self, limit: int = 33554432, key: bytes | None = None) -> None: ...
    def feed(self, data: bytes | bytearray | memoryview) -> None: ...
    def next(self) -> bytes | None:
        """
        The next whole payload, or None when more bytes are needed. Raises ProtocolError; then close the stream.
        """

    @property
    def buffered(self) -> int: ...

class Channel:
    """Frames in and out of a non-blocking stream socket, which it borrows."""

    def __init__(self, fd: int, key: bytes | None) -> None: ...
    def rekey(self, send: bytes | None, receive: bytes | None) -> None: ...
    def hold(self) -> None: ...
    def send(self, payload: bytes, descriptors: Sequence[int] = []) -> int:
        """Returns how many bytes wait for flush()."""

    def flush(self) -> int: ...
    def close(self) -> None: ...
    def read_next(self) -> bytes | None:
        """
        Take in what has come, then as next(). Raises InstanceClosed at the end of the stream.
        """

    def next(self) -> bytes | None:
        """
        The next whole payload of what was taken in, or None. Raises ProtocolError; then close the connection.
        """

    @property
    def buffered(self) -> int: ...
    def take_descriptors(self) -> list[int]: ...
    def watch(self, look_s: float, sleep_s: float) -> bool:
        """
        True when there may be something to read: looks for `look_s` where that pays, then sleeps up to `sleep_s`.
        """

class Poller:
    """Waits on an epoll descriptor, which it borrows. For one thread."""

    def __init__(self, epoll: int) -> None: ...
    def wait(self, look_s: float, timeout_s: float) -> list[tuple[int, int]]:
        """
        (descriptor, events) of what is ready: looks for `look_s` where that pays, then sleeps up to `timeout_s`.
        """

def block_keys(
    tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    block_tokens: int,
    seed: int,
) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]:
    """Chained 64-bit keys of the whole blocks of int32 tokens."""

def tokens_of_list(tokens: list[Any]) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))] | None:
    """A list of plain ints as int32 tokens, or None."""

def draw_lowest(
    costs: Annotated[NDArray[numpy.float64], dict(shape=(None,), order="C", device="cpu", writable=False)], lot: int
) -> int:
    """
    Index of the lowest cost, of equal ones the one that the number `lot` falls on.
    """

class PromptTreeStats:
    @property
    def blocks(self) -> int: ...
    @property
    def entries(self) -> int: ...
    @property
    def nodes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def evicted(self) -> int: ...
    @property
    def expired(self) -> int: ...
    @property
    def orphans(self) -> int: ...

class PromptTree:
    def __init__(self, max_bytes: int | None = None) -> None: ...
    def insert(
        self,
        keys: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        slot: int,
        expiry: float,
        now: float,
        parent: int | None = None,
    ) -> int: ...
    def remove(
        self,
        keys: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        slot: int,
        now: float,
    ) -> int: ...
    def match(
        self,
        keys: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        now: float,
        scores: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu")],
    ) -> int: ...
    def match_at(
        self,
        keys: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        now: float,
        slots: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        held: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu")],
        scale: int,
    ) -> None: ...
    def limit(self, slot: int, blocks: int) -> None: ...
    def retire(self, slot: int) -> None: ...
    def sweep(self, now: float, max_nodes: int) -> int: ...
    def entries(self, slot: int) -> int: ...
    def stats(self) -> PromptTreeStats: ...
    def check(self) -> None: ...

class CandidateTable:
    """
    What each instance that may take a prompt holds of it, has to do, and would take.
    """

    def __init__(
        self,
        slots: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        pending_s: Annotated[NDArray[numpy.float64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        slowness: Annotated[NDArray[numpy.float64], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
    ) -> None: ...
    @staticmethod
    def of(
        slots: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        held_tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        queued_s: Annotated[NDArray[numpy.float64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        own_s: Annotated[NDArray[numpy.float64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        uncached_s: float,
    ) -> CandidateTable:
        """One with these entries."""

    def score(
        self,
        tree: PromptTree,
        keys: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        now: float,
        block_tokens: int,
    ) -> None:
        """Adds what this tree believes to be held."""

    def believe(
        self,
        credit: Annotated[NDArray[numpy.float64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        block_tokens: int,
    ) -> None: ...
    def distinct(self) -> list[int]:
        """The different numbers of tokens held, ascending."""

    def price(self, own_s: Sequence[float], uncached_s: float) -> None:
        """Times by distinct(), and with nothing held, at slowness 1."""

    def __len__(self) -> int: ...
    def at(self, i: int) -> tuple[int, int, float, float]:
        """Slot, tokens held, queued and own seconds."""

    @property
    def longest(self) -> int: ...
    @property
    def held_tokens(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...
    @property
    def queued_s(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,))]: ...
    @property
    def own_s(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,))]: ...
    @property
    def uncached_s(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,))]: ...
    def draw_queued(self, lot: int) -> int:
        """The least queued."""

    def draw_predicted(self, lot: int) -> int:
        """The least queued and own time."""

    def draw_uncached(self, lot: int) -> int:
        """The least queued and time with nothing held."""

class SimulatedFleet:
    """All instances of a simulation and the clock over them."""

    def __init__(
        self,
        *,
        block_tokens: int,
        kv_bytes_per_token: int,
        prefill_keeps: bool,
        decode_keeps: bool,
        returns: bool,
        horizon_s: float,
    ) -> None: ...
    def add_request(
        self,
        keys: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        prompt_blocks: int,
        num_tokens: int,
        output_tokens: int,
    ) -> int:
        """The arrays are kept, not copied."""

    def add_seat(self, *, pauses: bool, cache_blocks: int, kv_tokens: int, slowness: float) -> int: ...
    def arrivals(self, times_s: Sequence[float]) -> None: ...
    def begin_life(self, seat: int) -> None: ...
    def end_life(self, seat: int) -> None: ...
    def call_at(self, time_s: float, mark: int) -> None: ...
    def start(self, number: int, prefill: int, decode: int, fetch_from: int = -1, fetch_blocks: int = 0) -> int: ...
    def give_up(self, job: int) -> None: ...
    def replicate(self, number: int, source: int, target: int, blocks: int) -> None: ...
    def replication(self, number: int) -> tuple[int, int, int]:
        """Request, target seat, blocks."""

    def keep(self, seat: int, number: int, blocks: int) -> numpy.typing.NDArray[numpy.uint64] | None: ...
    def next(self, answer: float) -> tuple[int, int, int, numpy.typing.NDArray[numpy.uint64] | None]: ...
    def now(self) -> float: ...
    def busy_s(self, seat: int) -> float: ...
    @property
    def planned(self) -> int: ...
    @property
    def events(self) -> int: ...
    @property
    def moved_bytes(self) -> int: ...

    DONE: int = 0

    CALL: int = 1

    ARRIVED: int = 2

    PREFILLED: int = 3

    FINISHED: int = 4

    HAND_OVER_FAILED: int = 5

    RETURNED: int = 6

    REPLICATED: int = 7

    PREFILL_TIME: int = 8

    STEP_TIME: int = 9

    TRANSFER_TIME: int = 10

class PackedWeight:
    """A matrix in its WeightStore."""

class WeightStore:
    """
    Weights packed one by one, in the order in which decoding streams them.
    """

    def __init__(self) -> None: ...
    def pack(self, array: numpy.typing.NDArray[Any]) -> PackedWeight:
        """A copy, which lives as long as what is built of it."""

class FfnStack:
    """FFN layers of one model, natively; one thread at a time."""

    def __init__(self, hidden: int, kernels: str = "auto") -> None: ...
    def add_dense(self, weights: dict[str, object]) -> None: ...
    def add_moe(self, weights: dict[str, object], sizes: dict[str, object]) -> None: ...
    def forward(
        self,
        layer: int,
        x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
        out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
    ) -> None: ...
    def active_bytes(self, layer: int) -> int: ...
    @property
    def num_layers(self) -> int: ...

class KvView:
    """
    A pool's view of [slots, layers, parts, block_tokens, heads, dim], kept alive.
    """

    def __init__(self, array: numpy.typing.NDArray[Any]) -> None: ...

class AttentionStack:
    """The KV side of one model, natively; one thread at a time."""

    def __init__(
        self,
        hidden: int,
        ends: dict[str, object],
        inv_freq: Sequence[float],
        rope_scale: float,
        rope_form: int,
        kernels: str = "auto",
    ) -> None: ...
    def add_grouped(self, weights: dict[str, object], sizes: dict[str, object]) -> None: ...
    def add_latent(self, weights: dict[str, object], sizes: dict[str, object]) -> None: ...
    def embed(
        self,
        tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        residual: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
    ) -> None: ...
    def attend(
        self,
        layer: int,
        kv: KvView,
        positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
        delta: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)]
        | None,
        residual: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
        normed: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
    ) -> None: ...
    def logits(
        self,
        delta: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)]
        | None,
        residual: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
        out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
    ) -> None: ...
    @property
    def num_layers(self) -> int: ...

def streaming_read(array: numpy.typing.NDArray[Any], kernels: str = "auto") -> int:
    """
    Read an array once and do nothing with it: what the benchmarks compare with.
    """

def multiply_adds(count: int, kernels: str = "auto") -> float:
    """
    Do so many multiply-adds in registers: what the benchmarks compare with.
    """

def kernel_names() -> list[str]:
    """Kernel tables that run on this machine."""

class Board:
    """Shared memory over which workers and host hand batches to each other."""

    @staticmethod
    def create(sizes: dict[str, object]) -> Board: ...
    @staticmethod
    def attach(fd: int) -> Board: ...
    @property
    def fd(self) -> int: ...
    def set_model(self, model: int, layer_cost: float, owners: Sequence[Sequence[int]]) -> None: ...
    def set_seat(
        self,
        seat: int,
        tokens: Sequence[int],
        position: int,
        end: int,
        tables: Sequence[Sequence[int]],
        sampling: dict[str, object],
    ) -> None:
        """
        `tables`: blocks on each attention rank that has some of the model's heads.
        """

    def form(self, slot: int, model: int, seats: Sequence[int], ranks: Sequence[int] = [0]) -> None:
        """
        Compose a batch in a slot that is idle or the host's; `ranks`: attention ranks that share its heads.
        """

    def set_in_flight(self, in_flight: int) -> None:
        """
        Batches that the attention worker keeps between attention and FFN; 1 is no pipeline.
        """

    def set_turn(self, slot: int, turn: int) -> None: ...
    def take(self, slot: int) -> bool:
        """
        Take a ready slot back for the host; False when it is not ready or was just started.
        """

    def turn(self, slot: int) -> int: ...
    def set_layer(self, slot: int, layer: int) -> None:
        """Before a stage that the host names."""

    def arrived(self, slot: int) -> int:
        """Bits of attention ranks that are done with a slot in this turn."""

    def layer(self, slot: int) -> int: ...
    def call(self, slot: int) -> None:
        """Ask for a slot at its next token boundary."""

    def position(self, seat: int) -> int: ...
    def finish(self, seat: int) -> int: ...
    def tokens(self, seat: int) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...
    def stamps(self, seat: int) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """When each drawn token was known, ns."""

    def events(self, worker: int) -> Annotated[NDArray[numpy.int64], dict(shape=(None, None))]:
        """
        Stages a worker ran, [n, 6]: start and end in ns, slot, model, layer, rows. FFN rank r is worker 8 + r.
        """

    def bell(self) -> int:
        """The host's bell, to pass to rest()."""

    def rest(self, seen: int, timeout_ms: int) -> None: ...
    def ring(self) -> None: ...
    def abort(self) -> None: ...

class HiddenLink:
    """Slots of one FFN rank over a connected socket, which the link owns."""

    def __init__(self, board: Board, fd: int, rank: int, at_ffn: bool) -> None: ...
    def send(self) -> None: ...
    def receive(self) -> None: ...
    def step(self, slot: int) -> None: ...
    def shut(self) -> None: ...

class AttentionWorker:
    """The KV side's worker; one thread runs it."""

    def __init__(self, board: Board, rank: int = 0) -> None: ...
    def activate(self, model: int, stack: AttentionStack, kv: KvView) -> None:
        """The caller keeps stack and KV alive until it deactivates the model."""

    def deactivate(self, model: int) -> None: ...
    def run(self) -> None: ...
    def step(self, slot: int) -> None: ...
    @property
    def stages(self) -> int: ...

class FfnWorker:
    """One rank of the weights pool; one thread runs it."""

    def __init__(self, board: Board, rank: int) -> None: ...
    def activate(self, model: int, stack: FfnStack, places: Sequence[int]) -> None:
        """The caller keeps the stack alive until it deactivates the model."""

    def deactivate(self, model: int) -> None: ...
    def run(self) -> None: ...
    def step(self, slot: int) -> None: ...
    @property
    def stages(self) -> int: ...
