"""What a caller gets wrong is a ConfigError with the setting and its value, and leaves the pool as it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from poolweave.errors import ConfigError
from poolweave.mempool import MemPool
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
        ((1, Tier.HBM, "soon"), "timeout", "soon"),
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
