"""The control messages between a coordinator and an instance: typed, versioned, bounded. Knows no socket.

On the wire a message is two frames: a `Header` and one struct of `Request` or `Reply`, both MessagePack. KV never
travels here; it goes from pool to pool (poolweave.transfer).
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

import msgspec
import numpy as np

from poolweave import errors
from poolweave.errors import PoolweaveError, RequestRefused
from poolweave.index import Identity
from poolweave.serving.engine.sequence import SamplingParams
from poolweave.serving.tenant_quota import Owner
from poolweave.types import Int32Array, TokenIds, as_tokens

PROTOCOL = 2
MAX_FRAME_BYTES = 8 << 20  # two million tokens; a larger frame is refused by the sender and cut off by the receiver


class Header(msgspec.Struct, frozen=True, array_like=True):
    """`epoch`: the server's, drawn at its start; 0 from a client that has not been welcomed yet.

    `timeout_s`: how long the sender will wait; 0 for no limit. The receiver turns it into a deadline of its own clock.
    """

    version: int
    epoch: int
    request_id: int
    timeout_s: float = 0.0


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One request as an instance needs it. `request` names it in every process; `tokens` are int32, little endian."""

    request: str
    tokens: bytes
    flow: str
    sampling: SamplingParams
    owner: Owner = Owner()  # another one never hits this one's KV

    def prompt(self) -> Int32Array:
        return np.frombuffer(self.tokens, dtype="<i4").astype(np.int32, copy=False)


def pack_tokens(tokens: TokenIds) -> bytes:
    """`tokens` as `Job.tokens` carries them. Raises TypeError or ValueError for what is no token id."""
    return as_tokens(tokens).astype("<i4", copy=False).tobytes()


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer, seen by its sender: `num_blocks` offered, `pulled_blocks` of them lacking at the receiver.

    `early_nbytes` of the bytes were there before the last of the KV was computed; it went in `steps`.
    """

    num_blocks: int = 0
    pulled_blocks: int = 0
    nbytes: int = 0
    calls: int = 0
    seconds: float = 0.0
    early_nbytes: int = 0
    steps: int = 0


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An exception of poolweave.errors on its way: class name, message, numbers."""

    kind: str
    message: str
    numbers: dict[str, Any] = {}

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        """Any exception; what is not of poolweave.errors keeps its class name in the message."""
        if isinstance(error, PoolweaveError):
            numbers = {name: _plain(getattr(error, name)) for name in error.fields}
            return cls(kind=type(error).__name__, message=str(error), numbers=numbers)
        return cls(kind="PoolweaveError", message=f"{type(error).__name__}: {error}")

    def error(self) -> PoolweaveError:
        """The exception again, of its own class where this side knows it."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, PoolweaveError)):
            return PoolweaveError(f"{self.kind}: {self.message}")
        return kind(self.message, **{name: self.numbers.get(name) for name in kind.fields})


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str, bytes)) else str(value)


# --- requests: coordinator to instance ----------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Who are you? Answered by Welcome; the one request that needs no epoch."""


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Let the instance's pool reach the pool of `peer`; replaces an address known before. Answered by Done."""

    peer: str
    address: str


class Disconnect(msgspec.Struct, frozen=True, tag=True):
    """Forget the pool of `peer`. Answered by Done."""

    peer: str


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Compute the prompt's KV and its first token, hand the KV to `decode`. Emit, then Prefilled."""

    job: Job
    decode: str


class Decode(msgspec.Struct, frozen=True, tag=True):
    """Take the KV that came under the job's tag and go on after `first`. Emit ..., then Finished.

    `lost`: why no KV came; then the prompt is computed again. So it is when what came turns out to have failed.
    """

    job: Job
    first: int
    prefill: str
    lost: str | None = None


class Complete(msgspec.Struct, frozen=True, tag=True):
    """Both phases here. Emit ..., then Finished."""

    job: Job


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End the job named `request` if it runs here: it finishes as "cancelled". Answered by Done, always."""

    request: str


class Discard(msgspec.Struct, frozen=True, tag=True):
    """Nobody will decode the job named `request` here: free the KV that came, or comes, for it. Answered by Done."""

    request: str


class Copy(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Let the pool of `peer`, reached at `addresses`, index the KV that is held here of `tokens` (as in Job), as far as
    it lacks it. Answered by Copied."""

    tokens: bytes
    peer: str
    addresses: list[str]
    owner: Owner = Owner()


class Stats(msgspec.Struct, frozen=True, tag=True):
    """Answered by Counters."""


# --- replies: instance to coordinator -----------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """`addresses`: where peers reach the pool, by transport. `identity`: whose KV it keeps, without a tenant's salt.

    `events`, `replay`: where its pool publishes KV events, and where they are asked for again; None: nowhere.
    `model`: its name in a process with several, and `stations` are the control addresses there, by model.
    """

    instance: str
    role: str
    pid: int
    identity: Identity
    block_tokens: int
    block_bytes: int
    pool_blocks: int
    max_positions: int
    addresses: dict[str, str]
    events: str | None = None
    replay: str | None = None
    model: str = ""
    stations: dict[str, str] = {}


class Done(msgspec.Struct, frozen=True, tag=True):
    """It is done; nothing more to say."""


class Emit(msgspec.Struct, frozen=True, tag=True):
    """New tokens of the answer, in order. The only reply that is not the last one of its request."""

    tokens: list[int]
    finish_reason: str | None = None


class Prefilled(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The prompt's KV lies at the decode instance, or the answer ended with its first token (`finish_reason`).

    `sent_error`: why the KV did not get there: a decode instance that lives can compute it again.
    """

    cached_tokens: int
    sent: Sent
    finish_reason: str | None = None
    sent_error: ErrorInfo | None = None

    @property
    def lost(self) -> str | None:
        """What the decode instance is told of KV that did not come."""
        return self.sent_error.message if self.sent_error is not None else None


class Finished(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The answer is complete. `sent`: its KV's way back to the prefill instance; `sent_error`: why there was none."""

    finish_reason: str
    cached_tokens: int = 0
    sent: Sent = Sent()
    sent_error: ErrorInfo | None = None


class Copied(msgspec.Struct, frozen=True, tag=True):
    """The first `num_tokens` were held here, and the peer has them now."""

    num_tokens: int


class Counters(msgspec.Struct, frozen=True, tag=True):
    """What the pool counts, as plain numbers, the jobs that run, what the process's engine counts, and the prompts
    whose KV did not come here and was computed again.
    """

    pool: dict[str, Any]
    jobs: int
    engine: dict[str, Any] = {}
    recomputed: int = 0


class Failure(msgspec.Struct, frozen=True, tag=True):
    """The request, and nothing else, failed."""

    error: ErrorInfo


Request: TypeAlias = Hello | Connect | Disconnect | Prefill | Decode | Complete | Cancel | Discard | Copy | Stats
Reply: TypeAlias = Welcome | Done | Emit | Prefilled | Finished | Copied | Counters | Failure


class Codec:
    """Both directions of one side of the protocol: encodes anything, decodes what that side may receive."""

    _header: ClassVar[msgspec.msgpack.Decoder[Header]] = msgspec.msgpack.Decoder(Header)

    def __init__(self, accepts: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(accepts)

    def encode(self, header: Header, message: Any) -> list[bytes]:
        """The two frames. Raises RequestRefused when the message is over MAX_FRAME_BYTES."""
        body = self._encoder.encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise RequestRefused(
                f"a {type(message).__name__} message of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}; "
                "send a shorter prompt",
                needed=len(body),
                limit=MAX_FRAME_BYTES,
            )
        return [self._encoder.encode(header), body]

    def header(self, frames: list[bytes]) -> Header:
        """The header of a message. Raises RequestRefused for frames of another shape or protocol version."""
        if len(frames) != 2:
            raise RequestRefused(f"a message has 2 frames, got {len(frames)}", needed=2, limit=len(frames))
        try:
            header = self._header.decode(frames[0])
        except msgspec.DecodeError as error:
            raise RequestRefused(f"unreadable message header: {error}") from error
        if header.version != PROTOCOL:
            raise RequestRefused(
                f"the peer speaks protocol {header.version}, this side {PROTOCOL}; run the same poolweave on both",
                needed=header.version,
                limit=PROTOCOL,
            )
        return header

    def body(self, frames: list[bytes]) -> Any:
        """The message itself. Raises RequestRefused for one that this side does not know."""
        try:
            return self._decoder.decode(frames[1])
        except msgspec.DecodeError as error:
            raise RequestRefused(f"unreadable message: {error}") from error
