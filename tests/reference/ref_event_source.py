"""The oracle of KV events: a source with its true holdings, the batches it published, and what it can replay."""

from __future__ import annotations

import itertools

from poolweave.index.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event, encode_batch

Path = tuple[int, ...]  # one token a block: a prefix


class TrueSource:
    """Counts copies, as vLLM does: a block is held while any copy is. Keeps the last `kept` batches for replay."""

    def __init__(self, kept: int = 6) -> None:
        self.kept = kept
        self.stamps = itertools.count()
        self.restart()

    def restart(self) -> None:
        self.copies: dict[Path, int] = {}
        self.batches: list[bytes] = []

    def publish(self, events: list[Event]) -> tuple[int, bytes]:
        self.batches.append(encode_batch(float(next(self.stamps)), events))
        return len(self.batches) - 1, self.batches[-1]

    def store(self, path: Path, again: bool = False) -> tuple[int, bytes] | None:
        """The blocks of `path` that are not held (or, `again`, all of them once more), the parent being held."""
        first = 0
        while not again and first < len(path) and self.copies.get(path[: first + 1]):
            first += 1
        blocks = [path[: i + 1] for i in range(first, len(path))]
        if not blocks:
            return None
        for block in blocks:
            self.copies[block] = self.copies.get(block, 0) + 1
        parent = name(path[:first]) if first else None
        return self.publish(
            [
                BlockStored(
                    block_hashes=[name(block) for block in blocks],
                    parent_block_hash=parent,
                    token_ids=list(path[first:]),
                    block_size=1,
                    lora_id=None,
                    lora_name=None,
                    medium="GPU",
                )
            ]
        )

    def remove(self, block: Path) -> tuple[int, bytes]:
        self.copies[block] -= 1
        if not self.copies[block]:
            del self.copies[block]
        return self.publish([BlockRemoved(block_hashes=[name(block)], medium="GPU")])

    def clear(self) -> tuple[int, bytes]:
        self.copies.clear()
        return self.publish([AllBlocksCleared()])

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        first = max(start, len(self.batches) - self.kept)
        return [(i, self.batches[i]) for i in range(first, len(self.batches))]

    def leading(self, path: Path) -> int:
        return sum(1 for _ in itertools.takewhile(lambda i: path[: i + 1] in self.copies, range(len(path))))


def name(block: Path) -> int:
    return int("1" + "".join(map(str, block)))
