"""The prompt tree as a flat dictionary: (instance, prefix of keys) -> expiry. Oracle of tests/scheduler."""

from __future__ import annotations


class ReferencePromptTree:
    """Entries of an instance are closed upward: inserting a prompt tells of all its prefixes."""

    def __init__(self) -> None:
        self.expiry: dict[tuple[int, tuple[int, ...]], float] = {}
        self.now = 0.0

    def alive(self, slot: int, prefix: tuple[int, ...]) -> bool:
        return self.expiry.get((slot, prefix), self.now) > self.now

    def insert(self, prompt: tuple[int, ...], slot: int, expiry: float) -> None:
        for end in range(1, len(prompt) + 1):
            entry = (slot, prompt[:end])
            self.expiry[entry] = max(self.expiry.get(entry, 0.0), expiry)

    def remove(self, prompt: tuple[int, ...], slot: int) -> int:
        """Drop `prompt` and what continues it; returns how many living entries that were."""
        gone = [e for e in self.expiry if e[0] == slot and e[1][: len(prompt)] == prompt and self.alive(*e)]
        for entry in gone:
            del self.expiry[entry]
        return len(gone)

    def retire(self, slot: int) -> None:
        self.expiry = {entry: expiry for entry, expiry in self.expiry.items() if entry[0] != slot}

    def match(self, prompt: tuple[int, ...], num_slots: int) -> list[int]:
        scores = []
        for slot in range(num_slots):
            n = 0
            while n < len(prompt) and self.alive(slot, prompt[: n + 1]):
                n += 1
            scores.append(n)
        return scores

    def entries(self, slot: int) -> int:
        return sum(self.alive(*entry) for entry in self.expiry if entry[0] == slot)
