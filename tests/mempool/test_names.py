"""C12: one live owner a name; SIGKILL frees it and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from poolweave.errors import AddressInUse
from poolweave.mempool import MemPool
from poolweave.transfer import KVLayout

OWNER = """
import sys
from poolweave.mempool import MemPool
from poolweave.transfer import KVLayout
layout = KVLayout(num_layers=1, kv_heads=1, head_dim=8, dtype="float32")
pool = MemPool(layout, instance=sys.argv[1], hbm="4MiB", dram="4MiB")
blocks = pool.alloc(4)
pool.view()[pool.slots(blocks)] = 1
print(pool.address, flush=True)
sys.stdin.read()
"""


@pytest.mark.multiproc
def test_c12_sigkill_frees_the_name_and_leaves_nothing(layout: KVLayout, tmp_path: Path) -> None:
    name = f"owner-{os.getpid()}"
    before = sorted(os.listdir("/dev/shm"))
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline().startswith("shm://")
        with pytest.raises(AddressInUse, match="another instance name"):
            MemPool(layout, instance=name, hbm="1MiB")
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        with MemPool(layout, instance=name, hbm="1MiB") as pool:
            assert pool.address == f"shm://{name}"
        assert sorted(os.listdir("/dev/shm")) == before
    finally:
        owner.kill()
        owner.communicate()


def test_a_closed_pool_gives_its_name_back(layout: KVLayout) -> None:
    for _ in range(2):
        with MemPool(layout, instance="again", hbm="1MiB"), pytest.raises(AddressInUse):
            MemPool(layout, instance="again", hbm="1MiB")


def test_a_pool_that_failed_to_start_holds_no_name(layout: KVLayout) -> None:
    with pytest.raises(ValueError, match="hbm"):
        MemPool(layout, instance="failed", hbm=1)
    MemPool(layout, instance="failed", hbm="1MiB").close()


def test_unnamed_pools_have_names_of_their_own(layout: KVLayout) -> None:
    with MemPool(layout, hbm="1MiB") as one, MemPool(layout, hbm="1MiB") as other:
        assert one.instance != other.instance
