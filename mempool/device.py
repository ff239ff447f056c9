"""A GPU as a pool names it, and a tier's memory there as arrays that torch, CuPy and their like take over DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np

from poolweave.errors import ConfigError
from poolweave.mempool._native import Device, device_array
from poolweave.transfer import KVLayout


def open_device(name: str) -> Device | None:
    """What "cuda" or "cuda:1" stands for; None for "cpu". Raises ConfigError for anything else, or where it cannot be
    had: without a driver, without that device."""
    if name == "cpu":
        return None
    kind, colon, ordinal = name.partition(":") if isinstance(name, str) else ("", "", "")
    if kind != "cuda" or (colon and not (ordinal.isascii() and ordinal.isdecimal() and len(ordinal) < 4)):
        raise ConfigError(f"device={name!r} is none of 'cpu', 'cuda', 'cuda:1' and so on", setting="device", value=name)
    return Device.open(int(ordinal or 0))


class DeviceArray:
    """A tier on a GPU: `[slots, layers, parts, block_tokens, heads, dim]`, without a copy; bfloat16 as uint16.

    torch.from_dlpack(view) is a tensor over the same memory, which it keeps. Slots without memory must not be touched.
    """

    def __init__(self, address: int, device: Device, layout: KVLayout, num_slots: int, keep: object) -> None:
        nothing = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (num_slots * layout.block_bytes,), (1,))
        like = layout.view(nothing, num_slots)  # its shape; of the bytes there is one
        self.shape = like.shape
        self.dtype = like.dtype
        self.strides = like.strides
        self._address = address
        self._device = device
        self._keep = keep

    def __dlpack__(self, **_: Any) -> Any:
        """A capsule that owns a part of this. No stream waits for another: who writes and reads is in step already."""
        steps = [stride // self.dtype.itemsize for stride in self.strides]
        code = {"f": 2, "u": 1}[self.dtype.kind]
        bits = 8 * self.dtype.itemsize
        return device_array(self._address, self._device.ordinal, list(self.shape), steps, code, bits, self._keep)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._device.ordinal  # kDLCUDA

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape, "strides": self.strides, "typestr": self.dtype.str, "data": (self._address, False),
            "version": 3, "stream": None,
        }  # fmt: skip
