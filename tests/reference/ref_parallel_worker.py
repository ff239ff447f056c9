"""An instance in a process of its own for the tests of parallelism, driven by JSON lines: a tensor rank, or one that
computes parts of prompts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from poolweave.mempool import MemPool, PoolConfig
from poolweave.serving.engine import EngineConfig, SamplingParams, Sequence, TorchEngine, load_model
from poolweave.serving.engine.tensor_parallel import RankGroup, shard_model
from poolweave.serving.instance.sequence_parallel import PromptPart, SplitPrompt
from poolweave.transfer import Cut, TransferConfig

HBM = "8MiB"


def run(engine: TorchEngine, sequence: Sequence) -> None:
    engine.add(sequence)
    while engine.has_work:
        engine.step()
    if sequence.error is not None:
        raise sequence.error


class Parent:
    """The worker, seen from a test. Leaving it ends the process."""

    def __init__(self) -> None:
        self.child = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, **command: Any) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(command) + "\n")
        self.child.stdin.flush()

    def hear(self) -> Any:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line, f"the worker ended with {self.child.wait()}"
        return json.loads(line)

    def ask(self, **command: Any) -> Any:
        self.tell(**command)
        return self.hear()

    def close(self) -> None:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.close()
        try:
            self.child.wait(60)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        self.child.stdout.close()


class Worker:
    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._group: RankGroup | None = None
        self._pools = stack.enter_context(ExitStack())

    def rank(self, model: str, rendezvous: str, rank: int, size: int) -> list[str]:
        """Become one rank of a model; the group is made once."""
        if self._group is None:
            self._group = self._stack.enter_context(RankGroup(Path(rendezvous), rank, size))
        loaded = load_model(model)
        shard = Cut(layout=loaded.layout, tp=size).shards[rank]
        return self._open(shard_model(loaded, shard, self._group.add_up), TransferConfig(shard=shard))

    def whole(self, model: str, order: str) -> list[str]:
        loaded = load_model(model)
        return self._open(replace(loaded, layout=replace(loaded.layout, order=order)), TransferConfig())

    def _open(self, model: Any, transfer: TransferConfig) -> list[str]:
        self._pools.close()
        self.pool = self._pools.enter_context(MemPool(model.layout, hbm=HBM, config=PoolConfig(transfer=transfer)))
        self.engine = TorchEngine(model, self.pool, EngineConfig(step_tokens=1024))
        return [self.pool.instance, self.pool.address]

    def connect(self, peers: list[list[str]]) -> bool:
        for name, address in peers:
            if name != self.pool.instance:
                self.pool.connect(name, address)
        return True

    def prefill(self, tokens: list[int], to: str, tag: str) -> list[int]:
        """Compute what the index lacks, send all to the decode instance. -> cached tokens, the first token"""
        pool, prompt = self.pool, np.array(tokens, np.int32)
        step = pool.layout.block_tokens
        with pool.match(prompt[: (len(tokens) - 1) // step * step]) as hit:
            blocks = hit.take()
        sequence = Sequence(
            tag, tokens, SamplingParams(max_new_tokens=1), num_computed=len(blocks) * step, blocks=blocks
        )
        run(self.engine, sequence)
        kept = sequence.blocks
        pool.seal(kept)
        pool.insert(prompt, kept)
        pool.transfer_with_insert(to, kept, prompt, tag=tag.encode()).result(60)
        pool.free(kept)
        pool.check()
        return [len(blocks) * step, sequence.answer[0]]

    def part(self, index: int, tokens: list[int], parts: list[list[int]], **rest: Any) -> Any:
        """Compute one part of a prompt. -> the token after it, tokens that its own index knows then"""
        prompt = SplitPrompt(
            tokens=np.array(tokens, np.int32), parts=tuple(range(a, b) for a, b in parts),
            instances=tuple(rest["instances"]), decode=rest["decode"], tag=rest["tag"].encode(),
        )  # fmt: skip
        part = PromptPart(self.pool, prompt, index)
        try:
            sequence = part.begin()
            run(self.engine, sequence)
            answer = sequence.answer
            part.end()
        finally:
            part.close()
        with self.pool.match(prompt.tokens) as hit:
            known = hit.num_tokens
        stats = self.pool.stats()
        self.pool.check()
        assert stats.transfer is not None
        return {"token": answer[0], "known": known, "received": stats.transfer.receiving.bytes}


def main() -> None:
    with ExitStack() as stack:
        worker = Worker(stack)
        for line in sys.stdin:
            command = json.loads(line)
            answer = getattr(worker, command.pop("do"))(**command)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
