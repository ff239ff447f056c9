"""What is NIXL's own: pieces that fit both ends, a process that ends well, and a name for what is missing.

The transfers themselves are the contract suite's, which runs over nixl wherever it is installed.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ref_transfer_world import require_nixl

from poolweave.errors import ConfigError
from poolweave.transfer import TransferConfig
from poolweave.transfer._native import Extents, Grid, Tiers
from poolweave.transfer.transports import nixl

ORDERS = st.permutations(range(6))


def extents(order: list[int], plane_bytes: int, layered: bool) -> Extents:
    """Six blocks of two planes each at made-up addresses: nothing follows them here."""
    slot, plane = (plane_bytes, 6 * plane_bytes) if layered else (2 * plane_bytes, plane_bytes)
    grid = Grid(
        base=1 << 40, nbytes=12 * plane_bytes, slot_stride=slot, plane_stride=plane, row_stride=plane_bytes,
        row_bytes=plane_bytes, num_slots=6, num_planes=2, num_rows=1,
    )  # fmt: skip
    return Tiers([1], [grid]).extents(np.ones(len(order), np.uint8), np.array(order, np.int32))


def addresses(one: Extents) -> list[int]:
    """Of every byte, in canonical order."""
    flat = np.empty(2 * one.num_runs, np.uint64)
    one.read_runs(flat)
    return [address + i for address, nbytes in flat.reshape(-1, 2).tolist() for i in range(nbytes)]


@given(ORDERS, ORDERS, st.booleans(), st.booleans(), st.integers(1, 6))
def test_pieces_pair_every_byte_once(to: list[int], at: list[int], to_layered: bool, layered: bool, count: int) -> None:
    target, source = extents(to[:count], 3, to_layered), extents(at[:count], 3, layered)
    pieces = nixl.pair_runs(target, source).tolist()
    pairs = [(here + i, there + i) for here, there, nbytes in pieces for i in range(nbytes)]
    assert pairs == list(zip(addresses(target), addresses(source), strict=True))
    for (here, there, nbytes), (next_here, next_there, _) in itertools.pairwise(pieces):
        assert (here + nbytes, there + nbytes) != (next_here, next_there)  # else they were one


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_PACKAGES", ("poolweave_has_no_such_package",))
    nixl.load_nixl.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'poolweave\[nixl\]'") as caught:
        nixl.load_nixl()
    assert caught.value.setting == "listen"
    assert TransferConfig(listen="nixl").doors("a")[0].scheme == "nixl"


@pytest.mark.multiproc
@pytest.mark.parametrize("code", [0, 7])
def test_a_process_that_used_it_ends_with_its_own_exit_code(code: int) -> None:
    """NIXL's libraries crash when they are torn down: 139 without the way around it."""
    require_nixl()
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "reference")!r})
from ref_transfer_world import World
world = World("nixl")
a, b = world.pair()
a.engine.offer(b.name, a.shipment(3, tag=b"t")).result(60)
b.engine.receive(b"t", 60).close()
world.close()
sys.exit({code})
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode == code
