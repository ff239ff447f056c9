"""Memory that blocks lie in: our own tiers, and a peer's as mapped here read-only.

Both turn places (tier, slot) into native extents. A mapping lives as long as anything refers to it, so dropping the
PeerMemory is enough: a copy under way keeps its pages.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from poolweave.errors import ProtocolError
from poolweave.transfer._native import Extents, Grid, Tiers, Window, hash_blocks
from poolweave.transfer.layout import KVLayout
from poolweave.transfer.messages import Space
from poolweave.transfer.store import Region
from poolweave.types import Int32Array, UInt64Array

TierArray = npt.NDArray[np.uint8]


class Memory:
    """Grids by tier. `keep` is whatever must stay alive while extents of it are used."""

    def __init__(self, grids: Mapping[int, Grid], keep: object = None) -> None:
        self.tiers = Tiers(list(grids), list(grids.values()))
        self._keep = keep

    def extents(self, tiers: TierArray, slots: Int32Array, windows: Sequence[Window] = ()) -> Extents:
        """The runs of these blocks. Raises TransferFailed for a place outside the memory."""
        return self.tiers.extents(tiers, slots, windows) if windows else self.tiers.extents(tiers, slots)


def space_of(layout: KVLayout, region: Region) -> Space:
    """`region` as peers are told of it."""
    slot, plane, row = layout.strides(region.num_slots)
    return Space(region.tier.value, region.nbytes, region.num_slots, slot, plane, row)


def grid_of(layout: KVLayout, space: Space, base: int) -> Grid:
    return Grid(
        base=base,
        nbytes=space.nbytes,
        slot_stride=space.slot_stride,
        plane_stride=space.plane_stride,
        row_stride=space.row_stride,
        row_bytes=layout.row_bytes,
        num_slots=space.num_slots,
        num_planes=layout.num_planes,
        num_rows=layout.block_tokens,
    )


class OwnMemory(Memory):
    """The tiers of our own store. `device`: the GPU that one of them lies on."""

    def __init__(self, layout: KVLayout, regions: Sequence[Region]) -> None:
        self.layout = layout
        self.block_bytes = layout.block_bytes
        self.spaces = tuple(space_of(layout, region) for region in regions)
        self.bases = tuple(region.address for region in regions)
        self.fds = tuple(region.fd for region in regions)
        self.joints = tuple(region.joint for region in regions)
        self.device = next((region.device for region in regions if region.device is not None), None)
        self.host = next((r for r in regions if r.joint is not None and r.joint.guests is not None), None)
        joint = self.host.joint if self.host is not None else None
        self.arena = f"{joint.arena:016x}" if joint is not None else ""  # names the arena whose blocks we can host
        super().__init__(
            {
                space.tier: grid_of(layout, space, region.address)
                for space, region in zip(self.spaces, regions, strict=True)
            }
        )

    def hash_blocks(self, extents: Extents, threads: int, hashes: UInt64Array) -> None:
        """XXH3-64 of each block of them, which are ours: where one may lie on a device, through the host's memory."""
        if self.device is None:
            hash_blocks(extents, 0, threads, hashes)
        else:
            self.device.hash_blocks(extents, 0, hashes)


def map_bytes(fd: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """The memfd `fd` mapped shared and read-only, all of it. Closes `fd`. Raises ProtocolError when under `nbytes`."""
    try:
        size = os.fstat(fd).st_size
        if size < max(nbytes, 8):
            raise ProtocolError(
                f"a peer's memory has {size} bytes where it announced {nbytes}", nbytes=size, limit=nbytes
            )
        return np.frombuffer(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
    except OSError as error:
        raise ProtocolError(f"a peer's memory cannot be mapped: {error}", nbytes=nbytes) from error
    finally:
        os.close(fd)


class PeerMemory(Memory):
    """A peer's tiers, mapped here: `fds[i]` is the memfd of `spaces[i]`. Takes the descriptors over."""

    def __init__(self, layout: KVLayout, spaces: Sequence[Space], fds: Sequence[int]) -> None:
        left = list(fds)
        try:
            views = []
            for space in spaces:
                views.append(map_bytes(left.pop(0), space.nbytes))
            grids = {
                space.tier: grid_of(layout, space, view.ctypes.data) for space, view in zip(spaces, views, strict=True)
            }
        finally:
            for fd in left:
                os.close(fd)
        super().__init__(grids, views)
