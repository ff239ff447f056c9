"""TierWindow: where another process of this instance finds a tier's memory, to write blocks into it."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from poolweave.errors import SystemCallFailed


@dataclass(frozen=True, slots=True)
class TierWindow:
    """The memory behind descriptor `fd` of process `pid`: plane `p` of row `r` is at `r * row_bytes + p * plane_bytes`.

    A value that can be sent to a worker of the same instance and user. Only rows that the pool's owner handed to it,
    and that it has not sealed, may be written; the owner keeps their references meanwhile.
    """

    pid: int
    fd: int
    nbytes: int
    row_bytes: int
    plane_bytes: int

    def open(self) -> npt.NDArray[np.uint8]:
        """The memory mapped here, `uint8[nbytes]`; it stays mapped while the array lives. Raises SystemCallFailed."""
        try:
            with open(f"/proc/{self.pid}/fd/{self.fd}", "r+b") as memory:
                return np.frombuffer(mmap.mmap(memory.fileno(), self.nbytes), np.uint8)
        except (OSError, ValueError) as error:  # ValueError: it is smaller than was said
            raise SystemCallFailed(
                f"the pool's memory (descriptor {self.fd} of process {self.pid}, {self.nbytes} bytes) cannot be mapped"
                f": {error}; its process has ended, or /proc is hidden from this one",
                errno=getattr(error, "errno", None),
            ) from error
