"""C11: pinned memory and huge pages, refused by name where required and not to be had, in stats where preferred."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from poolweave.errors import ConfigError
from poolweave.mempool import Arena, MemPool, PoolConfig
from poolweave.transfer import KVLayout
from poolweave.types import Tier

PAGE = 64 << 10


def free_huge_pages() -> int:
    try:
        with open("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages") as count:
            return int(count.read())
    except FileNotFoundError:
        return 0


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_c11_required_huge_pages_name_need_and_setting(layout: KVLayout) -> None:
    before = num_descriptors()
    need = free_huge_pages() + 1
    with pytest.raises(ConfigError, match=r"vm\.nr_hugepages") as error:
        MemPool(layout, instance="huge", hbm=need * (2 << 20), config=PoolConfig(huge_pages="require"))
    assert (error.value.value, error.value.limit) == (need, need - 1)
    with pytest.raises(ConfigError, match="page_bytes"):
        Arena(PAGE, page_bytes=PAGE, huge_pages="require")
    assert num_descriptors() == before


def test_c11_preferred_huge_pages_fall_back_and_say_so(layout: KVLayout) -> None:
    size = (free_huge_pages() + 1) * (2 << 20)
    with MemPool(layout, hbm=size, config=PoolConfig(huge_pages="prefer")) as pool:
        assert not pool.stats().tiers[Tier.HBM].memory.huge_pages
        assert len(pool.alloc(4)) == 4


def test_huge_pages_are_used_where_there_are_enough() -> None:
    if free_huge_pages() < 2:
        pytest.skip("no huge pages are set aside on this machine")
    arena = Arena(4 << 20, huge_pages="require")
    span = arena.reserve(4 << 20, sole=True)
    span.map(0, 2)
    span.buffer()[:] = 3
    assert arena.stats().huge_pages
    assert arena.stats().resident_bytes == 4 << 20
    span.unmap(1, 1)
    arena.set_budget(2 << 20)
    assert arena.stats().resident_bytes == 2 << 20
    assert span.buffer()[0] == 3
    assert span.buffer()[2 << 20] == 0


UNPRIVILEGED = """
import os, resource
from poolweave.errors import ConfigError
from poolweave.mempool import MemPool, PoolConfig
from poolweave.transfer import KVLayout
from poolweave.types import Tier
layout = KVLayout(num_layers=2, kv_heads=1, head_dim=8, block_tokens=4, dtype="float32")
MemPool(layout, hbm="1MiB").close()  # all modules are loaded: another user might not read them
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
if os.getuid() == 0:  # root's capability would lift the limit
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
before = len(os.listdir("/proc/self/fd"))
def pool(hbm, pinned):
    return MemPool(layout, instance="pins", hbm=hbm, config=PoolConfig(page_bytes=65536, max_hbm="8MiB", pinned=pinned))
try:
    pool("4MiB", "require")
except ConfigError as error:
    assert "RLIMIT_MEMLOCK" in str(error) and "ulimit -l" in str(error), error
    assert (error.value, error.limit) == (4 << 20, 1 << 20)
else:
    raise AssertionError("4 MiB were pinned under a limit of 1 MiB")
assert len(os.listdir("/proc/self/fd")) == before
assert "VmLck:\\t       0 kB" in open("/proc/self/status").read()
with pool("4MiB", "prefer") as fallen:
    assert fallen.stats().tiers[Tier.HBM].memory.pinned_bytes == 0
with pool("512KiB", "require") as pinned:
    assert pinned.stats().tiers[Tier.HBM].memory.pinned_bytes == 512 << 10
    try:
        pinned.resize(hbm="4MiB")
    except ConfigError as error:
        assert "RLIMIT_MEMLOCK" in str(error)
    else:
        raise AssertionError("grew beyond the limit")
    assert pinned.stats().tiers[Tier.HBM].total == 1024
    pinned.resize(hbm="256KiB")
    assert pinned.stats().tiers[Tier.HBM].memory.pinned_bytes == 256 << 10
    pinned.check()
print("held")
"""


@pytest.mark.multiproc
def test_c11_pinning_under_a_limit() -> None:
    done = subprocess.run([sys.executable, "-c", UNPRIVILEGED], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "held\n", done.stderr


@pytest.mark.parametrize("setting", ["pinned", "huge_pages"])
def test_misspelt_wishes_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        PoolConfig(**{setting: "maybe"})
    with pytest.raises(ConfigError, match=setting):
        Arena(PAGE, page_bytes=PAGE, **{setting: "yes"})
