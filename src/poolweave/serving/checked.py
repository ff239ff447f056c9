"""What came of holding answers against a reference."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """`ties`: tokens that were the second choice by less than 1e-4. `wrong`: each other difference, in words."""

    tokens: int
    ties: int
    wrong: tuple[str, ...]
