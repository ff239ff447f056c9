"""A seeded stress run over a pool's operations: `python -m poolweave.mempool.stress --seed 1 --steps 10000`.

Every block carries a stamp in all its bytes; each step does one random operation, and what is held is verified as it
goes, with check() every `--check-every` steps. All processes draw their DRAM tiers from one arena. The same seed gives
the same operations in a process (not the same evictions where processes compete). Exits with 1 on the first fault.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import random
import sys
from collections import Counter
from dataclasses import dataclass

import numpy as np

from poolweave.errors import ConfigError, OutOfBlocks, PoolweaveError, StaleHandle, TransferFailed, UnknownBlock
from poolweave.index import EVICTION_POLICIES
from poolweave.mempool.arena import Arena
from poolweave.mempool.blocks import Blocks
from poolweave.mempool.config import PoolConfig
from poolweave.mempool.pool import MemPool
from poolweave.transfer import KVLayout, TransferConfig
from poolweave.types import Tier

LAYOUT = KVLayout(num_layers=2, kv_heads=1, head_dim=16, block_tokens=4, dtype="float32")
PAGE_BYTES = 64 << 10
_TRANSFER_S = 60.0
_log = logging.getLogger(__name__)


class Fault(AssertionError):
    """The pool did what it must not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StressConfig:
    seed: int
    steps: int
    check_every: int = 200
    hbm_blocks: int = 64


class StressRun:
    """One process's share: a pool under random operations, and a second one that it sends to.

    The seed chooses the operations and the eviction policy.
    """

    def __init__(self, config: StressConfig, arena: Arena) -> None:
        self.config = config
        self.counts: Counter[str] = Counter()
        self._rng = random.Random(config.seed)
        self._held: list[tuple[Blocks, int]] = []  # the caller's, all blocks of an entry carry one stamp
        settings = PoolConfig(
            page_bytes=PAGE_BYTES,
            max_hbm=4 * config.hbm_blocks * LAYOUT.block_bytes,
            eviction=EVICTION_POLICIES[config.seed % len(EVICTION_POLICIES)],
            transfer=TransferConfig(listen="tcp"),
        )
        hbm = config.hbm_blocks * LAYOUT.block_bytes
        self.pool = MemPool(LAYOUT, hbm=hbm, dram=arena, config=settings)
        self.peer = MemPool(LAYOUT, hbm=hbm, config=settings)
        self.pool.connect(self.peer.instance, self.peer.address)
        self._operations = (
            (30, self.alloc), (25, self.free), (5, self.retain), (15, self.insert), (15, self.match),
            (4, self.delete), (4, self.swap_out), (4, self.swap_in), (2, self.resize), (2, self.trim),
            (5, self.wrong_handle), (2, self.send),
        )  # fmt: skip

    def run(self) -> None:
        """All steps. Raises Fault, or what check() raises."""
        weights = [weight for weight, _ in self._operations]
        with self.pool, self.peer:
            for step in range(1, self.config.steps + 1):
                _, operation = self._rng.choices(self._operations, weights)[0]
                try:
                    operation()
                    self.counts[operation.__name__] += 1
                except OutOfBlocks:
                    self.counts["out_of_blocks"] += 1
                if step % self.config.check_every == 0:
                    self.verify()
            for blocks, _ in self._held:
                self.pool.free(blocks)
            self._held.clear()
            self.verify()

    def verify(self) -> None:
        """check() of both pools, and every byte of what is held."""
        self.pool.check()
        self.peer.check()
        for blocks, stamp in self._held:
            self._expect(self.pool, blocks, stamp)
        live = len({handle for blocks, _ in self._held for handle in blocks})
        active = sum(tier.active for tier in self.pool.stats().tiers.values())
        if active != live:
            raise Fault(f"{active} blocks are active, {live} are held")

    # --- operations -----------------------------------------------------------------------------------------

    def alloc(self) -> None:
        if len(self._held) < 12:
            self._fresh(self._rng.randrange(9), self._rng.choice((Tier.HBM, Tier.DRAM, Tier.HBM | Tier.DRAM)))

    def free(self) -> None:
        if self._held:
            blocks, stamp = self._held.pop(self._rng.randrange(len(self._held)))
            self._expect(self.pool, blocks, stamp)
            self.pool.free(blocks)

    def retain(self) -> None:
        if self._held and len(self._held) < 12:
            blocks, stamp = self._rng.choice(self._held)
            self.pool.retain(blocks)
            self._held.append((blocks, stamp))

    def insert(self) -> None:
        prompt = self._rng.randrange(24)
        blocks = self._fresh(self._rng.randrange(1, 7), Tier.HBM)
        self._write(self.pool, blocks, prompt)
        self._held[-1] = (blocks, prompt)
        if self._rng.random() < 0.5:
            self.pool.seal(blocks)
        else:
            for layer in range(LAYOUT.num_layers):
                self.pool.seal(blocks, range(layer, layer + 1))
        self.pool.insert(self._tokens(prompt, len(blocks)), blocks)
        self._held.pop()
        self.pool.free(blocks)

    def match(self) -> None:
        prompt = self._rng.randrange(24)
        with self.pool.match(self._tokens(prompt, 6)) as hit:
            self._expect(self.pool, hit.blocks, prompt)
            if len(hit.blocks) and self._rng.random() < 0.3 and len(self._held) < 12:
                self._held.append((hit.take(), prompt))

    def delete(self) -> None:
        self.pool.delete(self._tokens(self._rng.randrange(24), 6))

    def swap_out(self) -> None:
        self.pool.swap_out(self._rng.randrange(12))

    def swap_in(self) -> None:
        if self._held:
            blocks, _ = self._rng.choice(self._held)
            self.pool.swap_in(blocks)
            self.pool.slots(blocks)

    def resize(self) -> None:
        self.pool.resize(hbm=self._rng.randrange(8, 4 * self.config.hbm_blocks) * LAYOUT.block_bytes)

    def trim(self) -> None:
        self.pool.trim()

    def wrong_handle(self) -> None:
        forged = Blocks.of([self._rng.choice((0, 2**63, 2**40 + 5))])
        calls = (self.pool.free, self.pool.retain, self.pool.seal, self.pool.tiers)
        try:
            self._rng.choice(calls)(forged)
        except (UnknownBlock, StaleHandle):
            return
        raise Fault("a forged handle was taken")

    def send(self) -> None:
        prompt = self._rng.randrange(24)
        with self.pool.match(self._tokens(prompt, 6)) as hit:
            if not len(hit.blocks):
                return
            tag = self._rng.randbytes(8)
            tokens = self._tokens(prompt, len(hit.blocks))
            try:
                self.pool.transfer_with_insert(self.peer.instance, hit.blocks, tokens, tag=tag).result(_TRANSFER_S)
                with self.peer.receive(tag, timeout=_TRANSFER_S) as got:
                    self._expect(self.peer, got.blocks, prompt)
            except TransferFailed:
                self.counts["refused_transfers"] += 1

    # --- helpers --------------------------------------------------------------------------------------------

    def _fresh(self, num_blocks: int, tier: Tier) -> Blocks:
        blocks = self.pool.alloc(num_blocks, tier)
        stamp = self._rng.randrange(1000, 1_000_000)
        self._write(self.pool, blocks, stamp)
        self._held.append((blocks, stamp))
        return blocks

    @staticmethod
    def _tokens(prompt: int, num_blocks: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.full(num_blocks * LAYOUT.block_tokens, prompt, np.int32)

    @staticmethod
    def _rows(pool: MemPool, blocks: Blocks) -> list[tuple[Tier, Blocks]]:
        tiers = pool.tiers(blocks)
        return [(tier, Blocks(blocks.array[tiers == tier.value])) for tier in (Tier.HBM, Tier.DRAM)]

    def _write(self, pool: MemPool, blocks: Blocks, stamp: int) -> None:
        for tier, chosen in self._rows(pool, blocks):
            if len(chosen):
                pool.view(tier)[pool.slots(chosen, tier)] = stamp

    def _expect(self, pool: MemPool, blocks: Blocks, stamp: int) -> None:
        for tier, chosen in self._rows(pool, blocks):
            if len(chosen) and not np.all(pool.view(tier)[pool.slots(chosen, tier)] == stamp):
                raise Fault(f"a block of stamp {stamp} in {tier.name} holds other bytes")


def work(config: StressConfig, arena: Arena) -> None:
    """One process's run; its outcome is the exit status."""
    run = StressRun(config, arena)
    try:
        run.run()
    except (AssertionError, RuntimeError, PoolweaveError):
        _log.exception("seed %s failed after %s", config.seed, dict(run.counts))
        sys.exit(1)
    sys.stdout.write(f"seed {config.seed}: {config.steps} steps, {dict(sorted(run.counts.items()))}\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m poolweave.mempool.stress", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--check-every", type=int, default=200)
    given = parser.parse_args(arguments)
    if given.processes < 1 or given.steps < 1 or given.check_every < 1:
        raise ConfigError("--processes, --steps and --check-every are at least 1", setting="processes")
    spawn = multiprocessing.get_context("spawn")
    arena = Arena(given.processes * 48 * PAGE_BYTES // 16, page_bytes=PAGE_BYTES)
    configs = [
        StressConfig(seed=given.seed + number, steps=given.steps, check_every=given.check_every)
        for number in range(given.processes)
    ]
    processes = [spawn.Process(target=work, args=(config, arena)) for config in configs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    arena.reap()
    arena.check()
    lost = arena.stats().held_bytes
    if lost:
        sys.stdout.write(f"{lost} bytes of the arena were not given back\n")
    return int(bool(lost) or any(process.exitcode for process in processes))


if __name__ == "__main__":
    sys.exit(main())
