"""What a caller gets wrong is a ConfigError with the setting and its value, and leaves the pool as it was."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from poolweave.errors import ConfigError
from poolweave.mempool import MemPool
from poolweave.transfer import KVLayout
from poolweave.types import Tier

MakePool = Callable[..., MemPool]


@pytest.mark.parametrize(
    ("arguments", "setting", "value"),
    [
        ((-1,), "num_blocks", -1),
        (("3",), "num_blocks", "3"),
        ((None,), "num_blocks", None),
        ((2.5,), "num_blocks", 2.5),
        ((1, 1), "tier", 1),
        ((1, "hbm"), "tier", "hbm"),
        ((-1, Tier.HBM, 1.0), "num_blocks", -1),
        (("3", Tier.HBM, 1.0), "num_blocks", "3"),
        ((1, 1, 1.0), "tier", 1),
        ((1, Tier.HBM, "soon"), "timeout", "'soon'"),
        ((1, Tier.HBM, math.nan), "timeout", "nan"),
        ((1, Tier.HBM, -1), "timeout", "-1"),
    ],
)
def test_alloc_names_the_wrong_argument(
    make_pool: MakePool, arguments: tuple[Any, ...], setting: str, value: object
) -> None:
    pool = make_pool(4)
    for call in (pool.alloc, lambda *given: asyncio.run(pool.alloc_async(*given))):
        with pytest.raises(ConfigError, match=setting) as caught:
            call(*arguments)
        assert (caught.value.setting, caught.value.value) == (setting, value)
    pool.check()
    pool.free(pool.alloc(4))


def test_the_other_calls_name_theirs(make_pool: MakePool) -> None:
    pool = make_pool(4, 4)
    blocks = pool.alloc(1)
    wrong: list[tuple[Callable[[Any], object], Any, str]] = [
        (pool.swap_out, -1, "num_blocks"),
        (pool.swap_out, "3", "num_blocks"),
        (lambda layers: pool.seal(blocks, layers), 1, "layers"),
        (lambda layers: pool.seal(blocks, layers), "all", "layers"),
        (lambda layers: pool.seal(blocks, layers), range(0, 2, 2), "layers"),
        (pool.namespace, "llama", "identity"),
    ]
    for call, value, setting in wrong:
        with pytest.raises(ConfigError) as caught:
            call(value)
        assert caught.value.setting == setting
    pool.check()
    pool.free(blocks)


@pytest.mark.parametrize("timeout", ["soon", math.nan, -0.5])
def test_no_wait_is_begun_that_cannot_be_meant(make_pool: MakePool, timeout: Any) -> None:
    pool = make_pool(4)
    waits: list[Callable[[], object]] = [
        lambda: pool.receive(b"tag", timeout),
        lambda: pool.follow(b"tag", timeout),
        lambda: pool.reserve("peer", 1, timeout=timeout),
    ]
    for wait in waits:
        with pytest.raises(ConfigError) as caught:
            wait()
        assert (caught.value.setting, caught.value.value) == ("timeout", repr(timeout))


def test_a_tag_that_nothing_can_arrive_under_is_not_waited_for(make_pool: MakePool) -> None:
    pool = make_pool(4)
    calls: list[Callable[[Any], object]] = [pool.receive, pool.follow, pool.discard]
    for call in calls:
        with pytest.raises(TypeError, match="tag is bytes, got str: 'request-1'"):
            call("request-1")


@pytest.mark.parametrize("given", [None, 3, "abc", b"abc"])
def test_what_names_no_blocks_or_tokens_is_said_with_its_value(make_pool: MakePool, given: Any) -> None:
    pool = make_pool(4)
    for call in (pool.free, pool.retain, pool.seal, pool.slots, pool.tiers):
        with pytest.raises(TypeError, match="blocks are Blocks, or their handles as integers"):
            call(given)
    if given != 3:
        for tokens_call in (pool.match, pool.delete):
            with pytest.raises(TypeError, match="tokens are a sequence of token ids"):
                tokens_call(given)
    with pytest.raises(ConfigError):
        pool.match([1, 2], ns="default")  # type: ignore[arg-type]
    pool.check()


def test_a_tier_that_the_machine_cannot_hold_is_refused() -> None:
    layout = KVLayout(num_layers=2, kv_heads=1, head_dim=16)
    with pytest.raises(ConfigError, match="more than this machine's memory") as caught:
        MemPool(layout, hbm="500TiB")
    assert (caught.value.setting, caught.value.value) == ("hbm", 500 << 40)
    with MemPool(layout, hbm="1MiB") as pool, pytest.raises(ConfigError):
        pool.resize(hbm="500TiB")
    with pytest.raises(ConfigError, match="layout is a KVLayout"):
        MemPool("llama", hbm="1MiB")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no name"):
        MemPool(layout, hbm="1MiB", instance=5)  # type: ignore[arg-type]
