"""Holding: references on blocks that one object holds until they are taken or it is closed. Knows no pool."""

from __future__ import annotations

import warnings
from collections.abc import Sized
from types import TracebackType
from typing import Any, ClassVar, Generic, TypeVar

from poolweave.errors import ConfigError

B = TypeVar("B", bound=Sized)
H = TypeVar("H", bound="Holding[Any]")


class Holding(Generic[B]):
    """`blocks` with one reference each. A context manager: closing drops them, unless take() handed them over.

    A kind says what it is called, how references are dropped, and what becomes of them when it was forgotten.
    """

    __slots__ = ("_open", "blocks")
    _kind: ClassVar[str] = "holding"

    def __init__(self, blocks: B) -> None:
        self.blocks = blocks
        self._open = True

    def take(self) -> B:
        """The blocks; their references are the caller's from now on. Raises ConfigError when taken or closed before."""
        if not self._open:
            raise ConfigError(f"this {self._kind} was taken or closed before", setting=self._kind)
        self._open = False
        return self.blocks

    def close(self) -> None:
        """Drop the references, unless taken. Idempotent."""
        if self._open:
            self._open = False
            if len(self.blocks):
                self._drop()

    def __enter__(self: H) -> H:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_open", False) and len(self.blocks):
            after = self._forgotten()
            message = f"poolweave: the {self._kind} of {len(self.blocks)} blocks was not closed: {after}"
            warnings.warn(message, ResourceWarning, stacklevel=2)

    def _drop(self) -> None:
        """Drop the references of `blocks`, once."""
        raise NotImplementedError

    def _forgotten(self) -> str:
        """What becomes of the references now; called by the garbage collector, so it waits for no lock."""
        return "they stay pinned"
