"""The prompt tree as a flat dictionary: (instance, prefix of keys) -> how long it is believed. Oracle."""

from __future__ import annotations

from collections import Counter


class ReferencePromptTree:
    """Entries of an instance are closed upward: inserting a prompt tells of all its prefixes."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int, tuple[int, ...]], tuple[float, int]] = {}  # expiry, taken in before it
        self.capacity: dict[int, int] = {}
        self.taken_in: Counter[int] = Counter()
        self.now = 0.0

    def alive(self, slot: int, prefix: tuple[int, ...]) -> bool:
        expiry, stamp = self.entries.get((slot, prefix), (self.now, 0))
        return expiry > self.now and self.taken_in[slot] - stamp <= self.capacity.get(slot, 2**32)

    def insert(self, prompt: tuple[int, ...], slot: int, expiry: float) -> None:
        prefixes = [prompt[:end] for end in range(1, len(prompt) + 1)]
        known = [prefix for prefix in prefixes if self.alive(slot, prefix)]
        stamp = self.taken_in[slot]
        for prefix in prefixes:
            before = self.entries[slot, prefix][0] if prefix in known else 0.0
            self.entries[slot, prefix] = (max(before, expiry), stamp)
        self.taken_in[slot] += len(prefixes) - len(known)

    def remove(self, prompt: tuple[int, ...], slot: int) -> int:
        """Drop `prompt` and what continues it; returns how many living entries that were."""
        gone = [e for e in self.entries if e[0] == slot and e[1][: len(prompt)] == prompt and self.alive(*e)]
        for entry in gone:
            del self.entries[entry]
        return len(gone)

    def retire(self, slot: int) -> None:
        self.entries = {entry: term for entry, term in self.entries.items() if entry[0] != slot}

    def match(self, prompt: tuple[int, ...], num_slots: int) -> list[int]:
        scores = []
        for slot in range(num_slots):
            n = 0
            while n < len(prompt) and self.alive(slot, prompt[: n + 1]):
                n += 1
            scores.append(n)
        return scores

    def living(self, slot: int) -> int:
        return sum(self.alive(*entry) for entry in self.entries if entry[0] == slot)
