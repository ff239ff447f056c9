"""The transfer engine of one instance: both halves, its doors and its thread. Source: MemServe §4.4."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from poolweave.errors import ConfigError, LayoutMismatch
from poolweave.transfer.addresses import Address
from poolweave.transfer.arriving import Arriving
from poolweave.transfer.config import TransferConfig
from poolweave.transfer.door import Door
from poolweave.transfer.leases import LeaseTable
from poolweave.transfer.loop import Loop
from poolweave.transfer.peers import Presence
from poolweave.transfer.receiver import Receiver
from poolweave.transfer.regions import OwnMemory
from poolweave.transfer.resharding import Cut, Shard
from poolweave.transfer.sender import Sender
from poolweave.transfer.sender_settings import SenderSettings
from poolweave.transfer.shipment import Arrival, Reservation, Shipment, Transfer, require_bytes
from poolweave.transfer.stats import TransferStats
from poolweave.transfer.store import BlockStore, Payer
from poolweave.transfer.tls import Tls
from poolweave.transfer.transport import Home, Limits, Transport
from poolweave.transfer.transports import ON_DEVICES, TRANSPORTS
from poolweave.types import Tier, require_timeout

_NOBODY = Payer()


class TransferEngine:
    """Sends blocks of `store` to other instances and receives theirs. Thread-safe; one thread of its own.

    The epoch is new at each start. Raises ConfigError, AddressInUse. close() it, or use it as a context manager.
    """

    def __init__(self, instance: str, store: BlockStore, config: TransferConfig | None = None) -> None:
        config = config if config is not None else TransferConfig()
        doors = config.doors(instance)
        self.instance = instance
        self.epoch = secrets.randbits(62) + 1
        self._config = config
        self._closed = False
        tls = Tls(config.tls) if config.tls is not None else None
        leases = LeaseTable()
        limits = Limits(
            stall_s=config.stall_s,
            connect_timeout_s=config.connect_timeout_s,
            copy_threads=config.copy_threads,
            connections=config.connections,
            secret=config.secret,
            hand_over=config.hand_over,
            tls=tls,
        )
        self._home = Home(
            instance=instance,
            epoch=self.epoch,
            memory=OwnMemory(store.layout, store.regions()),
            leases=leases,
            limits=limits,
            shard=_shard(config, store),
            data_address=self._data_address,
            exchange=config.exchange,
        )
        self._loop = Loop(f"poolweave-transfer-{instance}", self._tick, config.spin_s)
        self._doors: list[Door] = []
        self._transports: dict[str, Transport] = {}
        try:
            for address in (door.on(self._home.memory.arena) for door in doors):
                if self._home.memory.device is not None and address.scheme not in ON_DEVICES:
                    raise ConfigError(
                        f"a pool on a GPU cannot be reached over {address.scheme}; listen on "
                        f"{', '.join(sorted(ON_DEVICES))}, or make the pool with device='cpu'",
                        setting="listen", value=address.scheme,
                    )  # fmt: skip
                self._transports[address.scheme] = TRANSPORTS[address.scheme](self._home)
                self._doors.append(Door(self._loop, address, limits, self._greet))
        except BaseException:
            self._release_all()
            raise
        self._receiver = Receiver(self._home, store, self._transports, config.pull_workers, self._loop)
        settings = SenderSettings(
            lease_s=config.lease_s,
            checksums=config.checksums,
            max_in_flight_bytes=config.max_in_flight_bytes,
            spin_s=config.spin_s,
        )
        self._sender = Sender(self._home, store, self._loop, self._transports, settings)
        for door in self._doors:
            door.open()
        self._loop.start()

    @property
    def address(self) -> str:
        """Where peers connect: the first address of `listen`."""
        return self._advertised(self._doors[0].address)

    @property
    def addresses(self) -> dict[str, str]:
        """All addresses, by transport."""
        return {door.address.scheme: self._advertised(door.address) for door in self._doors}

    def connect(self, peer: str, address: str | Sequence[str] | Mapping[str, str]) -> None:
        """Know `peer` by its address, or by several, of which the first usable one is taken: arena, inproc, shm, nccl,
        nixl, tcp.

        Dials at the first transfer. Raises ConfigError for addresses whose transport this instance does not listen on.
        """
        texts = (
            [address]
            if isinstance(address, str)
            else [*(address.values() if isinstance(address, Mapping) else address)]
        )
        parsed = [Address.parse(text) for text in texts]
        ours = {(door.address.scheme, door.address.arena) for door in self._doors}
        usable = sorted(
            (a for a in parsed if (a.scheme, a.arena) in ours), key=lambda a: list(TRANSPORTS).index(a.scheme)
        )
        if not usable:
            raise ConfigError(
                f"{peer} is reached over {', '.join(a.realm for a in parsed)}, this instance speaks "
                f"{', '.join(door.address.realm for door in self._doors)}; add one of theirs to listen",
                setting="listen",
                value=str(texts),
            )
        self._sender.connect(peer, usable, usable[0].scheme if len(parsed) == 1 else "auto")

    def disconnect(self, peer: str) -> None:
        """Forget `peer`; what is on its way to it fails. Unknown names are ignored."""
        self._sender.disconnect(peer)

    def presence(self, peer: str) -> Presence:
        """Whether `peer` is there now. Does not wait: it dials when no connection stands, and the next call tells.

        A process that ends is seen at once, a host that vanishes is not. Raises UnknownPeer, InstanceClosed.
        """
        return self._sender.presence(peer)

    def offer(self, peer: str, shipment: Shipment, *, priority: int = 0) -> Transfer:
        """Offer blocks to `peer`, which pulls what it lacks. Higher priority goes first among those that wait.

        The blocks are lent until the transfer is done, at most `lease_s`. Raises UnknownPeer, DuplicateTransfer,
        StaleEpoch, NotSealed, StaleHandle, InstanceClosed; what happens later is told by the Transfer.
        """
        return self._sender.offer(peer, shipment, priority)

    def receive(self, tag: bytes, timeout: float | None = None) -> Arrival:
        """Wait for the transfer `tag` and take what arrived. Close the result, or take() its blocks.

        Raises TransferTimeout after `timeout` seconds, what the transfer failed with, InstanceClosed.
        """
        require_bytes(tag, "tag")
        require_timeout(timeout)
        return self._receiver.claim(tag, timeout)

    def discard(self, tag: bytes) -> None:
        """Nobody will receive `tag`: drop what arrived under it, and what does within a lease. Does not wait."""
        require_bytes(tag, "tag")
        self._receiver.discard(tag, time.monotonic() + self._config.lease_s)

    def follow(self, tag: bytes, timeout: float | None = None) -> Arriving:
        """Wait until the growing transfer `tag` has begun, and look at its blocks while they come. For one follower.

        Raises TransferTimeout after `timeout` seconds, InstanceClosed. receive() still hands the whole over at the end.
        """
        require_bytes(tag, "tag")
        require_timeout(timeout)
        return Arriving(self._receiver.assembler, self._receiver.assembler.follow(tag, timeout))

    def reserve(
        self, peer: str, num_blocks: int, tier: Tier = Tier.HBM, timeout: float = 5.0, payer: Payer = _NOBODY
    ) -> Reservation:
        """Set blocks aside at `peer` for one transfer's `dst`; they go back there after `lease_s`.

        Raises OutOfBlocks (the peer's figures), TransferTimeout, PeerLost, UnknownPeer, ConfigError.
        """
        require_timeout(timeout)
        return self._sender.reserve(peer, num_blocks, tier, timeout, payer)

    def unreserve(self, reservation: Reservation) -> None:
        """Give a reservation back unused. Best effort; its lease ends anyway."""
        self._sender.unreserve(reservation)

    def stats(self) -> TransferStats:
        return TransferStats(self.epoch, self._sender.stats(), self._receiver.stats())

    def check(self) -> None:
        """Asserts all invariants."""
        self._sender.check()
        self._receiver.check()

    def close(self) -> None:
        """End all transfers: lent blocks are given back, unclaimed arrivals dropped. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._sender.close()
        self._receiver.close()
        self._loop.stop()
        self._sender.hang_up_all()
        self._receiver.hang_up_all()
        self._release_all()

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _release_all(self) -> None:
        self._loop.stop()
        for door in self._doors:
            door.close()
        for transport in self._transports.values():
            transport.close()
        self._loop.close()
        self._home.leases.close()
        if self._home.limits.tls is not None:
            self._home.limits.tls.close()

    def _greet(self, *arguments: object) -> None:
        self._receiver.greet(*arguments)  # type: ignore[arg-type]

    def _tick(self, now: float) -> float:
        wanted = min(self._sender.tick(now), self._receiver.tick(now), *(door.tick(now) for door in self._doors))
        # Never longer than a lease: an offer made later needs no wake-up then, its deadline lies behind this one.
        return min(wanted, time.monotonic() + self._config.lease_s)

    def _data_address(self, connection: socket.socket, scheme: str) -> str:
        """Where a peer reached over `connection` finds our data plane of this transport."""
        door = next(door for door in self._doors if door.address.scheme == scheme)
        if self._config.advertise is None and door.address.is_wildcard:
            return str(Address(scheme, connection.getsockname()[0], door.address.port))
        return self._advertised(door.address)

    def _advertised(self, address: Address) -> str:
        advertise = self._config.advertise
        return advertise if advertise is not None and advertise.startswith(f"{address.scheme}:") else str(address)


def _shard(config: TransferConfig, store: BlockStore) -> Shard:
    """What the store holds of its model. Raises LayoutMismatch when the settings say another thing than its layout."""
    if config.shard is None:
        return Cut.whole(store.layout)
    ours, theirs = store.layout.fingerprint(), config.shard.layout.fingerprint()
    if ours != theirs:
        raise LayoutMismatch(
            f"shard {config.shard.seat} of this model is {theirs}, the pool stores {ours}; give it that shard's layout",
            ours=ours,
            theirs=theirs,
        )
    return config.shard
