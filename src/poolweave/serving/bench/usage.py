"""Usage: what a process holds at a moment."""

from __future__ import annotations

import ctypes
import gc
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Usage:
    """Resident memory, of it nothing that was freed, where the C library can give that back (glibc); /proc says it."""

    kib: float
    descriptors: int
    threads: int

    @classmethod
    def now(cls) -> Usage:
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        resident = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            resident * os.sysconf("SC_PAGE_SIZE") / 1024,
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
        )
