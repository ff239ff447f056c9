"""Lets another instance's pool have a prefix that is held here: for one prompt, or because many will come."""

from __future__ import annotations

import numpy as np

from poolweave.errors import UnknownPeer
from poolweave.mempool import Blocks, MemPool
from poolweave.serving.control.messages import Copied, Copy, ErrorInfo, Failure
from poolweave.serving.control.server import Caller
from poolweave.transfer import Transfer
from poolweave.types import Int32Array


def copy_prefix(pool: MemPool, ns: int, caller: Caller, request: Copy) -> None:
    """Answers the caller when the peer has indexed it, or could not: whole blocks of the longest prefix held here.

    Does not wait: the blocks are lent until the transfer is done. Raises ConfigError for addresses that are none.
    """
    tokens = np.frombuffer(request.tokens, dtype="<i4").astype(np.int32, copy=False)
    with pool.match(tokens, ns) as hit:
        held = tokens[: hit.num_tokens]
        if not len(held):
            caller.reply(Copied(0))
            return
        transfer = _offer(pool, ns, request, held, hit.blocks)
    transfer.add_done_callback(lambda ended: _tell(caller, len(held), ended))


def _offer(pool: MemPool, ns: int, request: Copy, held: Int32Array, blocks: Blocks) -> Transfer:
    """Membership made only pools of unlike phases known to each other."""
    try:
        return pool.transfer_with_insert(request.peer, blocks, held, ns)
    except UnknownPeer:
        pool.connect(request.peer, request.addresses)
        return pool.transfer_with_insert(request.peer, blocks, held, ns)


def _tell(caller: Caller, num_tokens: int, ended: Transfer) -> None:
    error = ended.exception()
    caller.reply(Copied(num_tokens) if error is None else Failure(ErrorInfo.of(error)))
