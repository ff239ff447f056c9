"""One piece of a transfer fails: which one is told to both sides, nothing of it stays, and the next transfer works.

C20 (one of four writes cannot be made) and, as far as a transfer goes, C23 (a load that fails at every block in turn).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ref_transfer_world import Node, World, same_kv

from poolweave.errors import TransferFailed
from poolweave.transfer import Shipment, pulls
from poolweave.transfer._native import Outcome
from poolweave.transfer.transports.inproc import InprocSource
from poolweave.transfer.transports.nccl import NcclSource
from poolweave.transfer.transports.nixl import NixlSource
from poolweave.transfer.transports.shm import MappedSource
from poolweave.transfer.transports.tcp import TcpSource

MakeWorld = Callable[[str], World]
BLOCKS = 4


class BadBlock:
    """Pulls of the block at `index` fail in the way of `how`, while it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, listen: str) -> None:
        self.index: int | None = None
        self.how: Callable[[], Outcome | None] = lambda: None
        kind: Any = {
            "inproc": InprocSource, "shm": MappedSource, "nccl": NcclSource, "nixl": NixlSource, "tcp": TcpSource,
        }[listen]  # fmt: skip
        original = kind.pull

        def pull(source: Any, slice_: Any) -> Outcome:
            done: Outcome = original(source, slice_)
            if self.index == slice_.first:
                outcome = self.how()
                if outcome is not None:
                    return outcome
                slice_.hashes[0] ^= np.uint64(1)  # as if its bytes had changed on the way
            return done

        monkeypatch.setattr(kind, "pull", pull)


def cannot() -> Outcome:
    raise TransferFailed("it cannot be posted")


@pytest.fixture
def bad(world: World, monkeypatch: pytest.MonkeyPatch) -> BadBlock:
    monkeypatch.setattr(sys.modules[pulls.__name__], "SLICE_BYTES", 1)  # every block is pulled by itself
    return BadBlock(monkeypatch, world.listen)


def fails_at(a: Node, b: Node, index: int) -> TransferFailed:
    """A transfer of fresh blocks that is to fail; nothing is held anywhere afterwards."""
    blocks = a.store.make(BLOCKS, seed=index)
    tokens = a.tokens(BLOCKS, seed=index)
    shipment = Shipment(blocks=blocks, num_tokens=len(tokens), tag=b"t", tokens=tokens, insert=True)
    sent = a.engine.offer(b.name, shipment)
    with pytest.raises(TransferFailed) as at_sender:
        sent.result(60)
    with pytest.raises(TransferFailed) as at_receiver:
        b.engine.receive(b"t", 60)
    assert at_sender.value.part == at_receiver.value.part
    assert sum(a.store.loans.values()) == 0
    assert b.store.in_use() == 0
    assert b.store.commits == 0
    a.store.release(blocks)
    return at_receiver.value


@pytest.mark.parametrize("how", [cannot, lambda: None, lambda: Outcome.REVOKED], ids=["error", "corrupt", "revoked"])
def test_a_block_that_fails_is_named_at_every_index(
    world: World, bad: BadBlock, how: Callable[[], Outcome | None], caplog: pytest.LogCaptureFixture
) -> None:
    a, b = world.pair()
    bad.how = how
    with caplog.at_level(logging.WARNING, "poolweave.transfer"):
        for index in range(BLOCKS):
            bad.index = index
            error = fails_at(a, b, index)
            assert str(index) in str(error.part)
            assert b.engine.stats().receiving.failed == index + 1  # counted once
            assert a.engine.stats().sending.failed == index + 1
            assert sum("failed" in record.message for record in caplog.records) == index + 1  # logged once
    bad.index = None
    blocks = a.store.make(BLOCKS)
    a.engine.offer(b.name, Shipment(blocks=blocks, num_tokens=16 * BLOCKS, tag=b"t")).result(60)
    with b.engine.receive(b"t", 60) as got:
        assert same_kv(a, blocks, b, got.blocks)
