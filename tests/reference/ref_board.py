"""Small random models as native stacks, a board to decode them on, and a plain loop that says what they should say."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from poolweave.crosspool_engine._native import AttentionStack, Board, FfnStack, KvView

HIDDEN, VOCAB, HEADS, DIM, BLOCK, LAYERS = 32, 61, 4, 8, 4, 3
READY, HOST = 1, 3
GREEDY = {"stops": [], "temperature": 0.0, "top_p": 1.0, "seed": 0}
STOP, LENGTH, BROKEN = 1, 2, 3


class Model:
    """Random weights, in a native attention stack, its KV, and an FFN stack with all layers."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        ends = {"embedding": self.draw(VOCAB, HIDDEN), "norm": self.ones(), "head": self.draw(VOCAB, HIDDEN)}
        self.attention = AttentionStack(HIDDEN, ends, [1.0, 0.1, 0.01, 0.001], 1.0, 0)
        self.ffn = FfnStack(HIDDEN)
        self.layers = []
        for _ in range(LAYERS):
            weights = {key: self.draw(HEADS * DIM, HIDDEN) for key in "qkv"}
            weights |= {"o": self.draw(HIDDEN, HEADS * DIM), "input_norm": self.ones(), "post_norm": self.ones()}
            self.attention.add_grouped(weights, {"heads": HEADS, "kv_heads": HEADS, "head_dim": DIM, "scale": 0.35})
            dense = {"gate": self.draw(48, HIDDEN), "up": self.draw(48, HIDDEN), "down": self.draw(HIDDEN, 48)}
            self.ffn.add_dense(dense)
            self.layers.append(dense)
        self.memory = np.zeros((40, LAYERS, 2, BLOCK, HEADS, DIM), np.float32)
        self.kv = KvView(self.memory)

    def draw(self, *shape: int) -> np.ndarray[Any, Any]:
        return (self.rng.standard_normal(shape) * 0.3).astype(np.float32)

    def ones(self) -> np.ndarray[Any, Any]:
        return self.rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)

    def decode(self, prompt: list[int], total: int) -> list[int]:
        """Greedy tokens by one plain loop over blocks of its own."""
        tokens = list(prompt)
        kv = KvView(np.zeros_like(self.memory))
        slots = np.arange(40, dtype=np.int32)[None]
        residual, normed, out = (np.empty((1, HIDDEN), np.float32) for _ in range(3))
        logits = np.empty((1, VOCAB), np.float32)
        for position in range(total - 1):
            self.attention.embed(np.array([tokens[position]], np.int32), residual)
            delta = None
            for layer in range(LAYERS):
                self.attention.attend(layer, kv, np.array([position], np.int32), slots, delta, residual, normed)
                self.ffn.forward(layer, normed, out)
                delta = out
            self.attention.logits(delta, residual, logits)
            if position + 1 >= len(tokens):
                tokens.append(int(logits.argmax()))
        return tokens


def make_board(models: int = 3, width: int = 1) -> Board:
    return Board.create(
        {"slots": 4, "max_rows": 3, "seats": 12, "max_tokens": 64, "block_tokens": BLOCK, "max_hidden": HIDDEN,
         "models": models, "events": 0, "width": width}
    )  # fmt: skip


def seat_request(board: Board, seat: int, prompt: list[int], end: int, blocks: list[int], **sampling: Any) -> None:
    board.set_seat(seat, prompt, 0, end, [blocks], {**GREEDY, **sampling})


@contextmanager
def running(board: Board, *workers: Any) -> Iterator[None]:
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        board.abort()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads), "a worker did not watch the abort word"


def wait_for(board: Board, slots: list[int]) -> None:
    while any(board.turn(slot) != HOST for slot in slots):
        seen = board.bell()
        if any(board.turn(slot) != HOST for slot in slots):
            board.rest(seen, 20_000)
