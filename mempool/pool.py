"""MemPool: the elastic block pool of one instance, composed of blocks, tiers, index and transfers.

Source: MemServe §4 (the three APIs of the memory pool, Table 1).
"""

from __future__ import annotations

import secrets
import warnings
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from poolweave.errors import ConfigError, InstanceClosed, OutOfBlocks
from poolweave.index import Identity
from poolweave.mempool.allocator import Allocator
from poolweave.mempool.arena import Arena
from poolweave.mempool.assembly import build_space
from poolweave.mempool.blocks import Blocks
from poolweave.mempool.catalogue import Catalogue, Indexed
from poolweave.mempool.config import PoolConfig
from poolweave.mempool.device import open_device
from poolweave.mempool.following import Following
from poolweave.mempool.hit import Hit
from poolweave.mempool.links import Links
from poolweave.mempool.name_lock import NameLock
from poolweave.mempool.pool_parts import BlocksLike
from poolweave.mempool.pool_tiers import PoolTiers
from poolweave.mempool.pool_transfers import PoolTransfers
from poolweave.mempool.reclaim import Reclaimer
from poolweave.mempool.refused import refuse_identity, refuse_request
from poolweave.mempool.resizer import Resizer
from poolweave.mempool.stats import PoolStats
from poolweave.mempool.store import PoolStore
from poolweave.mempool.sweeper import Sweeper
from poolweave.mempool.tier_window import TierWindow
from poolweave.mempool.tiers import TIERS, TierMemory
from poolweave.mempool.write_through import WriteThrough
from poolweave.transfer import KVLayout
from poolweave.types import Int32Array, Tier, TokenIds, UInt64Array, as_tokens, require_timeout

if TYPE_CHECKING:
    from poolweave.index.events import KVEventPublisher


class MemPool(PoolTiers, PoolTransfers):
    """KV blocks over HBM and DRAM, an index from prompts to them, and transfers to other instances.

    Blocks are reference-counted: alloc() gives the caller one reference, match() gives one to its Hit, insert() adds
    the index's, free() drops the caller's. Blocks that only the index refers to are evicted when room is needed,
    least recently used first or as `PoolConfig.eviction` says. Every call is atomic over all its blocks: wrong handles
    raise UnknownBlock or StaleHandle and change nothing. Thread-safe. Close it, best by `with`; views stay valid
    afterwards.
    """

    def __init__(
        self, layout: KVLayout, *, instance: str | None = None, hbm: int | str | Arena, dram: int | str | Arena = 0,
        device: str = "cpu", config: PoolConfig | None = None,
    ) -> None:  # fmt: skip
        """`hbm` and `dram` are sizes in bytes or like "2GiB"; 0 means no DRAM tier. On device "cpu" HBM is host memory,
        on "cuda:0" that GPU's.
        An Arena instead of a size is drawn on page by page, together with its other users, in any process.

        Raises ConfigError for sizes that hold no block, AddressInUse when a live pool owns the name `instance` (None: a
        random one).
        """
        config = config or PoolConfig()
        if not isinstance(layout, KVLayout):
            raise ConfigError(f"layout is a KVLayout, got {layout!r:.60}", setting="layout", value=repr(layout))
        self.device = device
        self.layout = layout
        self.instance = instance if instance is not None else f"pool-{secrets.token_hex(6)}"
        self._epoch = secrets.randbits(63) | 1
        self._name = NameLock(self.instance)
        try:
            self._space = build_space(layout, hbm, dram, config, self._epoch, open_device(device))
        except BaseException:
            self._name.close()
            raise
        self._table = self._space.table
        self._reclaimer = Reclaimer(self._space)
        self._resizer = Resizer(self._space, self._reclaimer)
        self._allocator = Allocator(self._space, self._reclaimer, self._resizer)
        self._draining, self._turns = self._resizer.draining, self._allocator.waiters.turns  # empty: nobody waits
        self._catalogue = Catalogue(self._space, config.identity(layout))
        self._store = PoolStore(self._space, self._catalogue, self._allocator)
        self._links = Links(self.instance, self._store, self._catalogue, config.transfer)
        self._sweeper: Sweeper | None = None
        if config.watermarks is not None:
            self._sweeper = Sweeper(self._space, self._reclaimer, config.watermarks, name=self.instance)
        self._writer: WriteThrough | None = None
        if config.write == "through":
            self._writer = WriteThrough(self._space, self._reclaimer, self._allocator.released, self.instance)
            self._space.on_sealed = self._writer.offer
        self._uncounted = config.quotas is None
        self._guests = self._space.guests
        self._closed = False

    # --- memory blocks --------------------------------------------------------------------------------------

    def alloc(
        self, num_blocks: int, tier: Tier = Tier.HBM, timeout: float | None = None, ns: int | None = None
    ) -> Blocks:  # fmt: skip
        """`num_blocks` blocks with one reference each, all or none; their bytes are undefined.

        `Tier.HBM | Tier.DRAM` takes either, HBM first. When blocks are short, historical ones are demoted to DRAM or
        evicted, in one pass at most. With `timeout` (seconds) it waits its turn without the GIL. Raises OutOfBlocks
        with the figures; AllocTimeout (also a TimeoutError) at the deadline; ConfigError. 20 ns a block, 128 at once.
        `ns` says whose quota pays: a tenant that would pass it gives up history of its own, or QuotaExceeded is raised.
        """
        try:
            if timeout is None and self._uncounted:
                blocks = self._table.alloc_blocks(num_blocks, tier._value_)
                return blocks if blocks is not None else Blocks(self._allocator.alloc(num_blocks, tier), self._epoch)
            return self._alloc_for(num_blocks, tier, timeout, self._catalogue.tenant(ns))
        except (TypeError, AttributeError, ValueError):
            refuse_request(num_blocks, tier, timeout)
            self._allocator.require_possible(num_blocks, tier)  # the core takes 64 bits
            raise

    async def alloc_async(
        self, num_blocks: int, tier: Tier = Tier.HBM, timeout: float | None = None, ns: int | None = None
    ) -> Blocks:  # fmt: skip
        """alloc() that waits as a task, for ever when `timeout` is None. Cancelling it allocates nothing."""
        require_timeout(timeout)
        tenant = self._catalogue.tenant(ns)
        try:
            return Blocks(await self._allocator.alloc_async(num_blocks, tier, timeout, tenant), self._epoch)
        except (TypeError, AttributeError):
            refuse_request(num_blocks, tier, timeout)
            raise

    def free(self, blocks: BlocksLike) -> None:
        """Drop one of the caller's references on each; the last one frees a block that is not indexed."""
        try:
            available = self._table.free_blocks(blocks)  # type: ignore[arg-type]
        except TypeError:  # an array or a list
            available = self._table.free(self._handles(blocks))
        if self._draining or self._turns or (self._guests is not None and self._table.has_departed):
            self._allocator.released(available)
        if self._sweeper is not None:
            self._sweeper.nudge()

    def retain(self, blocks: BlocksLike) -> None:
        """One more reference on each for the caller, to free() later."""
        with self._space.lock:
            self._table.retain(self._handles(blocks))

    def seal(self, blocks: BlocksLike, layers: range | None = None) -> None:
        """Their KV is written: from now on they may be indexed and sent, and nobody writes them again.

        With `layers` only that of these layers, which must follow those sealed before without a gap: a transfer by
        layer sends each as soon as it is sealed. A block is sealed when all its layers are. Raises ConfigError.
        """
        if layers is None:
            self._space.seal(self._handles(blocks))
            return
        try:
            right = layers.step == 1 and layers.start >= 0
        except AttributeError:
            right = False
        if not right:
            raise ConfigError(
                f"layers={layers!r} is no range of layers in order, such as range(0, 4)",
                setting="layers",
                value=str(layers),
            )
        handles = self._handles(blocks)
        self._table.seal_layers(handles, layers.start, max(layers.start, layers.stop))
        if layers.stop == self.layout.num_layers and self._space.on_sealed is not None:
            self._space.on_sealed(handles)

    def sealed_layers(self, blocks: BlocksLike) -> npt.NDArray[np.uint16]:
        """How many layers of each block are sealed, from the first on; all of a sealed block."""
        return self._store.sealed_layers(self._handles(blocks))

    def view(self, tier: Tier = Tier.HBM) -> Any:
        """The tier's memory, `[slots, layers, parts, block_tokens, heads, dim]`, without a copy; bfloat16 as uint16.

        It spans the tier's maximum, so it stays right when the pool is resized and keeps the memory after close().
        Slots beyond the current size read as zeros and must not be written. A numpy array; of HBM on a GPU a
        DeviceArray, which torch.from_dlpack takes, as it does the other.
        """
        return self._memory(tier).view()

    def window(self, tier: Tier = Tier.HBM) -> TierWindow:
        """view() for another process that writes this pool's blocks. Raises ConfigError where it cannot be mapped."""
        return self._memory(tier).window()

    def slots(self, blocks: BlocksLike, tier: Tier = Tier.HBM) -> Int32Array:
        """Rows of `blocks` in view(tier), int32[n]. Raises NotResident for a block that lies elsewhere: swap it in."""
        handles = self._handles(blocks)
        rows = np.empty(len(handles), np.int32)
        self._table.slots(handles, self._number(tier), rows)
        return rows

    def tiers(self, blocks: BlocksLike) -> npt.NDArray[np.uint8]:
        """Where each block lies, as Tier values."""
        return self._space.locate(self._handles(blocks))[0]

    # --- index ----------------------------------------------------------------------------------------------

    def namespace(self, identity: Identity) -> int:
        """The small int that stands for `identity` in `ns` arguments, while the caller has it or blocks are indexed
        under it; ns=None is the pool's default identity.

        Raises ConfigError for what is no Identity.
        """
        try:
            return self._catalogue.namespace(identity)
        except (TypeError, AttributeError):
            refuse_identity(identity)
            raise

    def namespace_of(self, digest: bytes) -> int:
        """The same for an identity that another process names by its digest, 16 bytes."""
        return self._catalogue.namespace_of(digest)

    def digest(self, ns: int | None = None) -> bytes:
        """The identity behind a namespace, as other processes name it. Raises ConfigError for none of ours."""
        return self._catalogue.digest(ns)

    def tenant(self, ns: int | None = None) -> bytes:
        """Whose quota pays for a namespace, as Identity.tenant_digest; b"" where nobody told it. Raises ConfigError for
        none of ours."""
        return self._catalogue.tenant_digest(ns)

    def match(self, tokens: TokenIds, ns: int | None = None, *, promote: bool = False) -> Hit:
        """The longest indexed prefix of `tokens`, whole blocks only, pinned until the Hit is closed or taken.

        With `promote` its blocks in DRAM are brought into HBM, all or, where there is no room for them, none.
        """
        found = self._catalogue.match(as_tokens(tokens), ns)
        if promote and len(found.handles):
            self._promote(found.handles)
        tiers, _ = self._space.locate(found.handles)
        return Hit(Blocks(found.handles, self._epoch), found.num_tokens, tiers, found.miss_reason, self._release)

    def insert(self, tokens: TokenIds, blocks: BlocksLike, ns: int | None = None) -> Indexed:
        """Index sealed `blocks` by `tokens`: when their last reference is freed they stay, as history.

        Only whole blocks are indexed, and as many as `tokens` and `blocks` both have: what either has beyond the other
        is left out, and the references to such blocks stay the caller's. Blocks whose places were indexed already are
        returned as `duplicates`; their references stay the caller's. Raises NotSealed, and ConfigError for a block that
        is given twice or indexed elsewhere.
        """
        return self._catalogue.insert(as_tokens(tokens), self._handles(blocks), ns)

    def delete(self, tokens: TokenIds, ns: int | None = None) -> int:
        """Forget what only this prompt needs, from its end upward; longer prompts keep what they share. -> blocks"""
        given, freed = self._catalogue.delete(as_tokens(tokens), ns)
        self._allocator.released(freed)
        return given

    # --- transfers and events -------------------------------------------------------------------------------

    def follow(self, tag: bytes, timeout: float | None = None) -> Following:
        """Wait until the growing transfer `tag` begins, to read its blocks layer by layer while they come.

        Close the result; receive() still hands over the whole. Raises TransferTimeout after `timeout` seconds.
        """
        return Following(self, self._links.engine.follow(tag, timeout), self._epoch)

    @property
    def events(self) -> KVEventPublisher | None:
        """Where others may listen to what the index holds; None without `PoolConfig.events`."""
        return None if self._space.recorder is None else self._space.recorder.publisher

    # --- whole pool -----------------------------------------------------------------------------------------

    def stats(self) -> PoolStats:
        """A frozen snapshot."""
        self._require_open()
        space = self._space
        with space.lock:
            if space.handed is not None:
                space.handed.collect(reap=True)
            tiers = {memory.tier: space.tier_stats(number) for number, memory in space.tiers.items()}
            return PoolStats(
                instance=self.instance, eviction=space.index.eviction, tiers=tiers, indexed=len(space.index),
                waiting=len(self._allocator.waiters), events=dict(space.counters), index=space.index.stats(),
                tenants={} if space.tenants is None else space.tenants.stats(),
                transfer=self._links.stats(),
            )  # fmt: skip

    def check(self) -> None:
        """Prove all invariants; raises when one does not hold. Call it while no other operation runs. Cost O(pool)."""
        self._links.check()
        self._space.check()

    def close(self) -> None:
        """End transfers and give the name back; later calls raise InstanceClosed. Idempotent. Views stay valid."""
        if self._closed:
            return
        self._closed = True
        self._links.close()
        if self._sweeper is not None:
            self._sweeper.close()
        if self._writer is not None:
            self._writer.close()
        self._space.close()
        self._table = self._space.table
        self._allocator.waiters.notify_all()
        self._name.close()

    def __enter__(self) -> MemPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(f"poolweave: pool {self.instance!r} was not closed", ResourceWarning, stacklevel=2)

    # --- private --------------------------------------------------------------------------------------------

    def _alloc_for(self, num_blocks: int, tier: Tier, timeout: float | None, tenant: int) -> Blocks:
        require_timeout(timeout)
        if timeout is not None:
            return Blocks(self._allocator.alloc_wait(num_blocks, tier, timeout, tenant), self._epoch)
        return Blocks(self._allocator.alloc(num_blocks, tier, tenant), self._epoch)

    def _promote(self, handles: UInt64Array) -> None:
        """Bring a hit's blocks into HBM if that can be; the references stay the caller's unless this raises."""
        try:
            self._space.counters["promoted"] += self.swap_in(Blocks(handles))
        except OutOfBlocks:
            return
        except BaseException:
            self._allocator.free(handles)
            raise

    def _number(self, tier: Tier) -> int:
        self._require_open()
        numbers = [number for number in self._space.tiers if TIERS[number] == tier]
        if not numbers:
            raise ConfigError(f"tier {tier} is none of this pool's", setting="tier", value=str(tier))
        return numbers[0]

    def _require_open(self) -> None:
        if self._closed:
            raise InstanceClosed("this pool was closed before")

    def _memory(self, tier: Tier) -> TierMemory:
        return self._space.tiers[self._number(tier)]

    def _release(self, blocks: Blocks) -> None:
        try:
            self.free(blocks)
        except InstanceClosed:
            return  # the pool went first, and the references with it
