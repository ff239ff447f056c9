"""What the host tells a worker process and what comes back: typed JSON over one private socket, in order.

None of these crosses a token's path with control lowering on: they add and take models, and map pages.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import TypeAlias

import msgspec

import poolweave.errors
from poolweave.errors import PoolweaveError


class Activate(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Load this worker's half of the model in `path` and serve it as number `index` of the board."""

    index: int
    path: str
    dtype: str
    layers: tuple[int, ...] = ()  # FFN: those of this rank
    experts: tuple[int, ...] | None = None  # FFN: routed experts of this rank in each of them; None: all
    unrouted: bool = True  # FFN: shared experts too
    num_layers: int = 0  # FFN: of the whole model
    max_blocks: int = 0  # attention: blocks of its KV range
    share: int = 0  # attention: which of `width` equal shares of the heads
    width: int = 1


class Deactivate(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Stop serving a model none of whose batches is on the board; all of it goes back. No-op when it is not here."""

    index: int


class Pages(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Change one model's range: unmap and then map runs of (first, count) pages."""

    index: int
    unmap: tuple[tuple[int, int], ...] = ()
    map: tuple[tuple[int, int], ...] = ()


class Locate(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Ask which pages of the arena lie behind these mapped pages of a range. Answer: `Done.values`."""

    index: int
    pages: tuple[int, ...]


class Step(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Run one stage of the batch in `slot`: control lowering off. The slot's turn is none of the worker's meanwhile."""

    slot: int


Order: TypeAlias = Activate | Deactivate | Pages | Locate | Step


class Done(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The order was carried out."""

    values: tuple[int, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """It was not, and nothing of it stays. `kind` is the exception's class."""

    kind: str
    message: str


Answer: TypeAlias = Done | Failed


class Remote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an FFN rank is served on another host, and the sizes of the board for its end."""

    address: str
    sizes: dict[str, int]


class WorkerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a worker process starts; descriptors are inherited. `arena_fds`: of an attention rank's KV, None for FFN."""

    rank: int
    board_fd: int
    channel_fd: int
    arena_fds: tuple[int, int] | None
    block_tokens: int
    kernels: str = "auto"
    core: int | None = None  # the CPU it is pinned to
    remote: Remote | None = None


_orders = msgspec.json.Decoder(Order)
_answers = msgspec.json.Decoder(Answer)


def send(channel: Connection, message: Order | Answer) -> None:
    channel.send_bytes(msgspec.json.encode(message))


def receive_order(channel: Connection) -> Order:
    return _orders.decode(channel.recv_bytes())


def receive_answer(channel: Connection) -> Answer:
    return _answers.decode(channel.recv_bytes())


def values_of(worker: str, answer: Answer) -> tuple[int, ...]:
    """What an order gave. Raises what the worker raised, as far as it is one of ours."""
    if isinstance(answer, Done):
        return answer.values
    kind = getattr(poolweave.errors, answer.kind, None)
    if isinstance(kind, type) and issubclass(kind, PoolweaveError):
        raise kind(f"worker {worker}: {answer.message}")
    raise PoolweaveError(f"worker {worker}: {answer.kind}: {answer.message}")
