"""What two engines say to each other: typed, bounded, checked when decoded. See docs/transfer_protocol.md.

A connection opens with Hello -> Welcome (or Refused). Then the side that dialled offers, the other pulls and answers:
    Offer -> Progress* -> Confirm | Failed        Cancel ends an offer from the offering side
    growing Offer, Ready+ -> Confirm | Failed     what is sealed is told stretch by stretch
    Reserve -> Reserved | Failed                  Unreserve gives a reservation back
Arrays travel as little-endian bytes. Source: MemServe §4.4 (transfer steps).
"""

from __future__ import annotations

from typing import TypeVar, Union

import msgspec

from poolweave import errors
from poolweave.errors import PoolweaveError, ProtocolError, TransferFailed

MAX_NAME = 256
MAX_TAG = 1024
MAX_BLOCKS = 1 << 20
MAX_STEPS = 1 << 14  # stretches of one growing offer
MAX_SHARDS = 1 << 10

Seat = tuple[int, int, int, int]  # tp, pp, stage, rank: which shard of the model an instance holds


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Checked on construction and on decoding: a bad field is a ValueError, which decode() turns into ProtocolError."""


class Space(_Message, frozen=True, tag="s"):
    """One tier of the sender's memory, as strides over its region (bytes)."""

    tier: int
    nbytes: int
    num_slots: int
    slot_stride: int
    plane_stride: int
    row_stride: int

    def __post_init__(self) -> None:
        _check(0 < self.tier < 256 and 0 < self.num_slots < 2**31, "a tier without slots")
        strides = (self.slot_stride, self.plane_stride, self.row_stride)
        _check(0 < self.nbytes < 2**48 and all(0 < stride < 2**48 for stride in strides), "a tier of impossible size")


class Hello(_Message, frozen=True, tag="hello"):
    """The first frame of a control connection. Descriptors for `spaces` and the lease table come with it (shm)."""

    instance: str
    epoch: int
    peer: str  # whom the dialling side means to reach
    nonce: bytes
    fingerprint: str  # KVLayout.fingerprint() of the whole model
    scheme: str
    data_address: str  # how the listening side reaches the data: an address (tcp), NIXL's metadata, or ""
    spaces: tuple[Space, ...]
    seat: Seat = (1, 1, 0, 0)

    def __post_init__(self) -> None:
        _check_seat(self.seat)
        _check(len(self.instance) <= MAX_NAME and len(self.peer) <= MAX_NAME, "a name is too long")
        _check(len(self.nonce) == 16, "the nonce is not 16 bytes")
        _check(len(self.spaces) <= 8, "too many tiers")


class DataHello(_Message, frozen=True, tag="data"):
    """The first frame of a data connection; after its Welcome both sides speak csrc/core/stream.hpp."""

    instance: str
    peer: str
    peer_epoch: int  # the life of the sender whose offers are pulled
    nonce: bytes

    def __post_init__(self) -> None:
        _check(len(self.instance) <= MAX_NAME and len(self.peer) <= MAX_NAME, "a name is too long")
        _check(len(self.nonce) == 16, "the nonce is not 16 bytes")


class Welcome(_Message, frozen=True, tag="welcome"):
    instance: str
    epoch: int
    nonce: bytes
    seat: Seat = (1, 1, 0, 0)

    def __post_init__(self) -> None:
        _check_seat(self.seat)
        _check(len(self.nonce) == 16, "the nonce is not 16 bytes")


class Refused(_Message, frozen=True, tag="refused"):
    """The listening side will not talk: `error` is a class of poolweave.errors."""

    error: str
    message: str
    numbers: dict[str, Union[int, str, None]]  # noqa: UP007


class Offer(_Message, frozen=True, tag="offer"):
    """Leased blocks that the receiver may pull: their places, tokens and checksums (xxh3, one a block, or none).

    Of a `growing` one nothing may be pulled before a Ready names it, with the checksums.
    """

    offer: int
    nonce: int
    lease_s: float
    tag: bytes
    num_blocks: int
    num_tokens: int
    tiers: bytes  # uint8 a block
    slots: bytes  # int32 a block
    checksums: bytes  # uint64 a block, or empty
    identity: bytes
    tenant: bytes  # whose quota pays, 16 bytes, or empty: the sender was not told
    tokens: bytes | None  # int32 a token
    insert: bool
    private: bool
    on_demand: int  # Tier value, 0: `reservation`
    reservation: int
    growing: bool = False

    def __post_init__(self) -> None:
        count = self.num_blocks
        # One test for the good case: it runs for every offer at both ends.
        if not (
            0 <= count <= MAX_BLOCKS
            and 0 <= self.num_tokens < 2**31
            and self.offer > 0
            and 0 < self.lease_s < 1e6
            and len(self.tiers) == count
            and len(self.slots) == 4 * count
            and len(self.checksums) in (0, 8 * count)
            and (self.tokens is None or len(self.tokens) == 4 * self.num_tokens)
            and len(self.tag) <= MAX_TAG
            and len(self.identity) == 16
            and len(self.tenant) in (0, 16)
            and 0 <= self.on_demand <= 3
            and (count == 0 or (self.on_demand == 0) == (self.reservation != 0))
        ):
            raise ValueError(
                f"an offer that does not add up: {count} blocks, {self.num_tokens} tokens, lease {self.lease_s} s, "
                f"{len(self.tiers)}/{len(self.slots)}/{len(self.checksums)} bytes of tiers, slots and checksums"
            )


class Ready(_Message, frozen=True, tag="ready"):
    """Layers of blocks of a growing offer are sealed: pull them. Steps count from 1; checksums as in Offer, of what
    the receiver's shard needs of this stretch.
    """

    offer: int
    step: int
    first_block: int
    end_block: int
    first_layer: int
    end_layer: int
    checksums: bytes

    def __post_init__(self) -> None:
        count = self.end_block - self.first_block
        _check(0 < self.step <= MAX_STEPS and self.offer > 0, "a step outside its offer")
        _check(self.first_block >= 0 and 0 < count <= MAX_BLOCKS, "a stretch without blocks")
        _check(0 <= self.first_layer < self.end_layer < 2**20, "a stretch without layers")
        _check(len(self.checksums) in (0, 8 * count), "checksums that do not fit the stretch")


class Confirm(_Message, frozen=True, tag="confirm"):
    """All blocks are valid at the receiver: `pulled_blocks` were moved, the others were there.

    `early_nbytes` of the bytes came before the last stretch of a growing offer was ready: while it was computed.
    `pull_s` is the time that moving and checking took, waits for more left out.
    """

    offer: int
    pulled_blocks: int
    nbytes: int
    calls: int
    early_nbytes: int = 0
    pull_s: float = 0.0


class Progress(_Message, frozen=True, tag="progress"):
    offer: int
    done_blocks: int
    total_blocks: int


class Failed(_Message, frozen=True, tag="failed"):
    """Nothing of `offer` is valid or held at the receiver; a reservation's request has a negative number."""

    offer: int
    error: str
    message: str
    numbers: dict[str, Union[int, str, None]]  # noqa: UP007


class Cancel(_Message, frozen=True, tag="cancel"):
    offer: int
    tag: bytes


class Reserve(_Message, frozen=True, tag="reserve"):
    """`identity` and `tenant` as in Offer: whose quota pays for the blocks."""

    request: int
    num_blocks: int
    tier: int
    lease_s: float
    identity: bytes
    tenant: bytes

    def __post_init__(self) -> None:
        _check(len(self.identity) == 16 and len(self.tenant) in (0, 16), "a reservation for nobody")
        _check(0 < self.num_blocks <= MAX_BLOCKS, f"a reservation of {self.num_blocks} blocks")
        _check(0 < self.lease_s < 1e6 and 0 < self.tier <= 255, "a reservation without lease or tier")


class Reserved(_Message, frozen=True, tag="reserved"):
    request: int
    reservation: int


class Unreserve(_Message, frozen=True, tag="unreserve"):
    reservation: int


Greeting = Union[Hello, DataHello]  # noqa: UP007
Reply = Union[Welcome, Refused]  # noqa: UP007
Request = Union[Offer, Ready, Cancel, Reserve, Unreserve]  # noqa: UP007  # dialling -> listening side
Answer = Union[Confirm, Progress, Failed, Reserved]  # noqa: UP007  # listening -> dialling side
Message = Union[Greeting, Reply, Request, Answer]  # noqa: UP007

M = TypeVar("M")

_ENCODER = msgspec.msgpack.Encoder()
GREETINGS = msgspec.msgpack.Decoder(Greeting)
REPLIES = msgspec.msgpack.Decoder(Reply)
REQUESTS = msgspec.msgpack.Decoder(Request)
ANSWERS = msgspec.msgpack.Decoder(Answer)

# The errors that may cross: those whose cause lies with the other side.
_CROSSING = (
    "OutOfBlocks", "QuotaExceeded", "LayoutMismatch", "DuplicateTransfer", "TransferFailed", "TransferTimeout",
    "PeerLost", "StaleEpoch", "ProtocolError", "UnknownPeer", "InstanceClosed", "ConfigError", "UnknownBlock",
)  # fmt: skip


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message)


def encode_offer(*fields: object) -> bytes:
    """As encode(Offer(*fields)), without the checks of its making: they are the receiver's, and cost a microsecond."""
    return _ENCODER.encode(("offer", *fields))


def decode(decoder: msgspec.msgpack.Decoder[M], payload: bytes) -> M:
    """Raises ProtocolError for anything but a valid message of that decoder's kinds."""
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a malformed message of {len(payload)} bytes: {error}", nbytes=len(payload)) from error


def describe(error: PoolweaveError) -> tuple[str, str, dict[str, int | str | None]]:
    """The class name, message and numbers of `error` as they cross; unknown classes become TransferFailed."""
    name = type(error).__name__ if type(error).__name__ in _CROSSING else "TransferFailed"
    fields = getattr(errors, name).fields
    raw = {field: getattr(error, field, None) for field in fields}
    return name, str(error), {k: v if isinstance(v, (int, str)) else None for k, v in raw.items()}


def revive(name: str, message: str, numbers: dict[str, int | str | None], peer: str) -> PoolweaveError:
    """The error that `describe` described, as it happened at `peer`."""
    kind: type[PoolweaveError] = getattr(errors, name) if name in _CROSSING else TransferFailed
    known = {key: value for key, value in numbers.items() if key in kind.fields}
    if "peer" in kind.fields:
        known["peer"] = peer
    return kind(f"{peer}: {message}", **known)


def _check_seat(seat: Seat) -> None:
    tp, pp, stage, rank = seat
    _check(0 <= stage < pp and 0 <= rank < tp and tp * pp <= MAX_SHARDS, "a shard that cannot be")


def _check(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)
