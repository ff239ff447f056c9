"""KV of a prompt goes to the decode engine while the prefill engine computes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from ref_vllm_engine import LAYERS, PAGE
from ref_waiting import until
from vllm_house import LAYOUT, House

from poolweave.errors import TransferFailed
from poolweave.integrations.vllm._native import swap_planes
from poolweave.transfer import Transfer, growing

PROMPT = list(range(22))  # in three steps: five whole blocks
WHOLE = 5


class Pair:
    """A prefill and a decode engine; `before(call)` comes before each layer that the former saves or loads."""

    def __init__(self, before: Callable[[int], None], **more: Any) -> None:
        here, there = f"early-p-{os.getpid()}-{id(self)}", f"early-d-{os.getpid()}-{id(self)}"
        calls = 0

        def copy(sources: Any, targets: Any, froms: Any, tos: Any) -> None:
            nonlocal calls
            calls += 1
            before(calls)
            swap_planes(sources, targets, froms, tos, PAGE * 4, 1)

        self.prefill = House(role="kv_producer", name=here, peers={there: f"shm://{there}"}, copy=copy, **more)
        self.decode = House(role="kv_consumer", name=there, peers={here: f"shm://{here}"}, wait_s=1e5)

    def counted(self, name: str) -> int:
        return self.prefill.traffic.counters[name]

    def told(self) -> list[int]:
        """Layers told of each step under way."""
        early = self.prefill.traffic._early
        return [] if early is None else [one.told for prompt in early._prompts.values() for one in prompt.written]

    def close(self) -> None:
        """Nothing may be held."""
        for house in (self.prefill, self.decode):
            until(house.quiet)
            house.idle()
            house.scheduler.close()


def test_each_layer_goes_as_soon_as_it_is_saved() -> None:
    def before(call: int) -> None:
        saved = (call - 1) % LAYERS
        if saved:
            until(lambda: pair.told() == [saved], "the layers saved before it are told")

    pair = Pair(before)
    told = pair.prefill.run(PROMPT, 1).told  # type: ignore[attr-defined]
    assert pair.decode.run(PROMPT, 6, kv_transfer_params=told).cached == WHOLE * LAYOUT.block_tokens
    assert pair.counted("early_blocks") == WHOLE
    assert pair.counted("early_bytes") > (WHOLE - 2) * LAYOUT.block_bytes, "all but the last step's last layer"
    moved = pair.decode.pool.stats().transfer
    assert moved is not None
    assert moved.receiving.bytes == WHOLE * LAYOUT.block_bytes, "nothing moved twice"
    pair.close()


@pytest.mark.parametrize("bad", range(1, 3 * LAYERS + 1))
def test_a_step_that_fails_is_never_whole_at_the_peer(bad: int) -> None:
    def before(call: int) -> None:
        if call == bad:
            raise TransferFailed("this layer cannot be saved")

    pair = Pair(before)
    told = pair.prefill.run(PROMPT, 1).told  # type: ignore[attr-defined]
    request = pair.decode.run(PROMPT, 6, kv_transfer_params=told)  # the model of vLLM asserts each block's KV
    kept = WHOLE if bad <= 2 * LAYERS else WHOLE - 1  # the next step saves what the last one could not, if there is one
    assert request.cached == kept * LAYOUT.block_tokens
    assert pair.counted("early_blocks") == 0
    pair.close()


def test_an_abort_in_the_middle_leaves_nothing_held() -> None:
    pair = Pair(lambda call: None)
    request = pair.prefill.request(PROMPT, 1)
    pair.prefill.engine.add(request)
    pair.prefill.engine.step()
    pair.prefill.engine.abort(request)
    pair.close()


def test_a_pool_without_room_for_the_whole_prompt_sends_what_it_keeps_at_the_end() -> None:
    pair = Pair(lambda call: None, blocks=3)
    told = pair.prefill.run(PROMPT, 1).told  # type: ignore[attr-defined]
    assert pair.decode.run(PROMPT, 6, kv_transfer_params=told).cached == 2 * LAYOUT.block_tokens
    assert pair.counted("early_blocks") == 0
    pair.close()


def test_a_transfer_that_takes_no_more_stretches_is_made_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "MAX_STEPS", 1)
    pair = Pair(lambda call: None)
    told = pair.prefill.run(PROMPT, 1).told  # type: ignore[attr-defined]
    assert pair.decode.run(PROMPT, 6, kv_transfer_params=told).cached == WHOLE * LAYOUT.block_tokens
    assert pair.counted("early_blocks") == 0
    pair.close()


def test_an_early_transfer_that_cannot_begin_keeps_nothing_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    ready, failures = Transfer.ready, iter([TransferFailed("not now")])

    def fail_once(transfer: Transfer, *arguments: Any) -> None:
        for error in failures:
            raise error
        ready(transfer, *arguments)

    monkeypatch.setattr(Transfer, "ready", fail_once)
    pair = Pair(lambda call: None)
    told = pair.prefill.run(PROMPT, 1).told  # type: ignore[attr-defined]
    assert next(failures, None) is None
    assert pair.decode.run(PROMPT, 6, kv_transfer_params=told).cached == WHOLE * LAYOUT.block_tokens
    assert pair.counted("early_blocks") == 0
    sending = pair.prefill.pool.stats().transfer.sending  # type: ignore[union-attr]
    assert sending.cancelled == 1
    pair.close()


def test_a_peer_that_is_not_there_gets_nothing_and_the_prompt_is_computed() -> None:
    pair = Pair(lambda call: None)
    pair.decode.scheduler.close()
    assert pair.prefill.run(PROMPT, 1).told is not None  # type: ignore[attr-defined]
    until(lambda: pair.counted("ship_failed") == 1)
    until(pair.prefill.quiet)
    pair.prefill.idle()
    pair.prefill.scheduler.close()
