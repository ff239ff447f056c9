"""The oracle of the prefix index: a dictionary from whole-block prefixes to payloads, and nothing clever."""

from __future__ import annotations

Prefix = tuple[int, ...]


class PrefixOracle:
    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.stored: dict[tuple[int, Prefix], int] = {}
        self.pins: list[tuple[int, Prefix]] = []

    def prefixes(self, tokens: Prefix) -> list[Prefix]:
        step = self.block_tokens
        return [tokens[: end + step] for end in range(0, len(tokens) - step + 1, step)]

    def match(self, tokens: Prefix, ns: int) -> list[int]:
        found = []
        for prefix in self.prefixes(tokens):
            if (ns, prefix) not in self.stored:
                break
            found.append(self.stored[ns, prefix])
        return found

    def insert(self, tokens: Prefix, payloads: list[int], ns: int) -> list[int]:
        """The payloads that were not taken."""
        present = self.match(tokens, ns)
        self.stored.update(
            zip(((ns, p) for p in self.prefixes(tokens)[len(present) :]), payloads[len(present) :], strict=False)
        )
        return payloads[: len(present)]

    def may_go(self, key: tuple[int, Prefix]) -> bool:
        """No longer prefix and no pin goes through it."""
        ns, prefix = key
        users = [k for k in (*self.stored, *self.pins) if k[0] == ns and k[1][: len(prefix)] == prefix]
        return all(k == key for k in users) and key not in self.pins

    def delete(self, tokens: Prefix, ns: int) -> list[int]:
        gone = []
        for prefix in reversed(self.prefixes(tokens)[: len(self.match(tokens, ns))]):
            if not self.may_go((ns, prefix)):
                break
            gone.append(self.stored.pop((ns, prefix)))
        return gone

    def give_up(self, payload: int) -> None:
        """The index says that it gave this one up: it must have been free to go."""
        [key] = [k for k, v in self.stored.items() if v == payload]
        assert self.may_go(key), f"{payload} was still needed"
        del self.stored[key]
