"""PoolTransfers: the calls of MemPool that send blocks to other instances and take them in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from poolweave.mempool.pool_parts import BlocksLike, PoolParts
from poolweave.mempool.received import Received
from poolweave.transfer import Presence, Reservation, Shipment, Transfer
from poolweave.types import Tier, TokenIds, as_tokens


class PoolTransfers(PoolParts):
    """A half of MemPool."""

    @property
    def address(self) -> str:
        """Where other instances reach this one: give it to their connect(). Listening begins at first use."""
        return self._links.engine.address

    @property
    def addresses(self) -> dict[str, str]:
        """The same for all transports listened on, by transport."""
        return self._links.engine.addresses

    @property
    def epoch(self) -> int:
        """Of this life, drawn anew at each start: what presence() says of it elsewhere."""
        return self._links.engine.epoch

    def connect(self, peer: str, address: str | Sequence[str] | Mapping[str, str]) -> None:
        """Know the instance `peer` by its address(es); dials at the first transfer. Raises ConfigError."""
        self._links.engine.connect(peer, address)

    def disconnect(self, peer: str) -> None:
        """Forget `peer`; what is on its way to it fails."""
        self._links.engine.disconnect(peer)

    def presence(self, peer: str) -> Presence:
        """Whether `peer` is there now: its epoch, or 0 while it is being dialled or cannot be. Does not wait.

        A process that ends is seen at once, a host that vanishes is not. Raises UnknownPeer.
        """
        return self._links.engine.presence(peer)

    def transfer(
        self, peer: str, blocks: BlocksLike, *, tag: bytes, num_tokens: int | None = None,
        dst: Reservation | None = None, on_demand: Tier | None = Tier.HBM, private: bool = False, growing: bool = False,
    ) -> Transfer:  # fmt: skip
        """Send sealed blocks to `peer`, whose receive(tag) gets them. They stay lent until the Transfer is done.

        `num_tokens` says how many tokens are valid (None: all). The receiver allocates in the tiers of `on_demand`, or
        uses what `dst` set aside there. `private`: the copy is the receiver's alone, it will not offer it on.
        `growing`: the blocks are still computed; Transfer.ready() says what is sealed, and that is pulled at once.
        Raises UnknownPeer, NotSealed, DuplicateTransfer, ...; what happens later is told by the Transfer.
        """
        handles = self._handles(blocks)
        return self._links.engine.offer(peer, Shipment(
            blocks=handles, num_tokens=self._links.whole(handles, num_tokens), tag=tag, private=private,
            on_demand=on_demand if dst is None else None, dst=dst, growing=growing,
        ))  # fmt: skip

    def transfer_with_insert(
        self, peer: str, blocks: BlocksLike, tokens: TokenIds, ns: int | None = None, *, tag: bytes = b"",
        dst: Reservation | None = None, on_demand: Tier | None = Tier.HBM, private: bool = False, growing: bool = False,
    ) -> Transfer:  # fmt: skip
        """Send the blocks of `tokens`, of which `peer` pulls what it lacks, and let it index them: one exchange.

        `blocks` covers all of `tokens`; a partial last block travels and is not indexed. Else as transfer(); without a
        tag nobody receives it, it is only indexed there.
        """
        handles = self._handles(blocks)
        prompt, identity, tenant = self._links.prompt(as_tokens(tokens), handles, ns)
        return self._links.engine.offer(peer, Shipment(
            blocks=handles, num_tokens=len(prompt), tag=tag, tokens=prompt, identity=identity, tenant=tenant,
            insert=True, private=private, on_demand=on_demand if dst is None else None, dst=dst, growing=growing,
        ))  # fmt: skip

    def receive(self, tag: bytes, timeout: float | None = None) -> Received:
        """Wait for what was sent under `tag`. Close the result, best by `with`, or take() its blocks.

        Raises TransferTimeout after `timeout` seconds, and what the transfer failed with. Unclaimed arrivals are
        dropped when their lease ends.
        """
        return Received(self._links.engine.receive(tag, timeout), self._epoch)

    def discard(self, tag: bytes) -> None:
        """Nobody will receive `tag`: its blocks are freed, now or when it arrives within a lease. Does not wait."""
        self._links.engine.discard(tag)

    def reserve(
        self, peer: str, num_blocks: int, tier: Tier = Tier.HBM, timeout: float = 5.0, ns: int | None = None
    ) -> Reservation:
        """Set blocks aside at `peer` for one transfer's `dst`; unused ones go back there when the lease ends.

        The tenant of `ns` pays for them there, whatever they are used for. Raises OutOfBlocks or QuotaExceeded with
        the peer's figures, TransferTimeout, PeerLost, UnknownPeer, ConfigError.
        """
        return self._links.engine.reserve(peer, num_blocks, tier, timeout, self._links.payer(ns))
