"""KV between engines' pools: a prefill/decode pair, and a pool process that is killed and comes back."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ref_vllm_engine import Request
from ref_vllm_peer import PeerEngine
from ref_waiting import until
from vllm_house import LAYOUT, House

from poolweave.errors import ConfigError, LayoutMismatch, TransferFailed
from poolweave.integrations.vllm import losses, pool_client
from poolweave.integrations.vllm.config import ConnectorConfig
from poolweave.integrations.vllm.pool_client import PoolClient
from poolweave.integrations.vllm.traffic import check_role
from poolweave.mempool import MemPool
from poolweave.serving.control.client import RpcClient
from poolweave.serving.pool_process.service import PoolServiceConfig
from poolweave.serving.process.child import Child, Program
from poolweave.transfer import KVLayout

PROMPT = list(range(22))
FOR_EVER = 1e5  # nothing may wait for it to be over


def settle(*houses: House) -> None:
    """Until nothing is on its way, and then nothing may be held."""
    for house in houses:
        until(house.quiet)
        house.idle()


@pytest.mark.multiproc
def test_a_pool_process_outlives_engines_and_engines_outlive_it() -> None:
    name = f"traffic-{os.getpid()}"
    program = Program(name, "poolweave.serving.pool_process.service", PoolServiceConfig(name=name, size="1MiB"))
    keeper = Child(program)
    keeper.wait_ready(60)
    first = House(keeper=name)
    cold = first.run(PROMPT, 6)
    until(lambda: first.traffic.counters["shipped"] == 1)
    settle(first)
    first.scheduler.close()

    second = House(keeper=name)
    warm = second.run(PROMPT, 6)
    assert (warm.cached, warm.output) == (20, cold.output)
    assert second.run(PROMPT, 6, cache_salt="x").cached == 0
    keeper.kill()
    until(lambda: second.traffic._keeper.peer is None)  # type: ignore[union-attr]
    other = second.run([*range(30, 60)], 3)
    assert other.cached == 0
    keeper.close()
    keeper = Child(program)
    keeper.wait_ready(60)
    until(lambda: second.traffic._keeper.peer is not None)  # type: ignore[union-attr]
    before = second.traffic.counters["shipped"]
    second.run([*range(30, 60)], 3)
    until(lambda: second.traffic.counters["shipped"] > before)
    settle(second)

    odd = MemPool(KVLayout(num_layers=1, kv_heads=1, head_dim=8, block_tokens=4), hbm="1MiB")
    with odd, pytest.raises(LayoutMismatch, match="another pool process"):
        PoolClient(name, odd)
    second.scheduler.close()
    keeper.close()


@pytest.fixture
def kept() -> Iterator[tuple[Child, str]]:
    """A pool process that keeps PROMPT's KV, and its name."""
    name = f"kept-{os.getpid()}"
    keeper = Child(Program(name, "poolweave.serving.pool_process.service", PoolServiceConfig(name=name, size="1MiB")))
    keeper.wait_ready(60)
    first = House(keeper=name)
    first.run(PROMPT, 1)
    until(lambda: first.traffic.counters["shipped"] == 1)
    first.scheduler.close()
    yield keeper, name
    os.kill(keeper.pid, signal.SIGCONT)
    keeper.close()


@pytest.mark.multiproc
def test_a_restarted_engine_waits_for_a_pool_process_that_stands_still(
    kept: tuple[Child, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, name = kept
    monkeypatch.setattr(pool_client, "_CALL_S", 0.05)
    os.kill(keeper.pid, signal.SIGSTOP)
    house = House(keeper=name, wait_s=FOR_EVER)
    assert house.traffic._keeper.peer is None  # type: ignore[union-attr]
    request = house.request(PROMPT)
    house.engine.add(request)
    for _ in range(50):
        assert not house.engine.step()
    os.kill(keeper.pid, signal.SIGCONT)
    until(lambda: request in house.engine.step(), "it ends")
    assert request.cached == 20
    settle(house)
    house.scheduler.close()


@pytest.mark.multiproc
def test_a_pool_process_that_is_silent_for_a_whole_wait_is_waited_for_once(
    kept: tuple[Child, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, name = kept
    monkeypatch.setattr(pool_client, "_CALL_S", 0.05)
    house = House(keeper=name, wait_s=0.3)
    client = house.traffic._keeper
    assert client is not None
    os.kill(keeper.pid, signal.SIGSTOP)
    assert house.run([1, *PROMPT]).cached == 0
    until(lambda: not client.present, "it counts as silent")
    request = house.request([2, *PROMPT])
    assert house.scheduler.lookup(request, 0) == 0, "without waiting"
    house.scheduler.finished(request)
    os.kill(keeper.pid, signal.SIGCONT)
    until(lambda: client.present, "it answers again")
    assert house.run(PROMPT).cached == 20
    settle(house)
    house.scheduler.close()


class Interrupted(PoolClient):
    """Its thread loses the process, once, just before it asks whether that still is silent."""

    lost = True

    @property
    def _silent(self) -> bool:
        if not self.lost:
            self.lost = True
            self._lose(self._client)
            return True
        return False

    @_silent.setter
    def _silent(self, value: bool) -> None:
        pass


@pytest.mark.multiproc
def test_a_process_that_an_asker_lets_go_of_is_attached_again(kept: tuple[Child, str]) -> None:
    pool = MemPool(LAYOUT, hbm="1MiB")
    with pool:
        client = Interrupted(kept[1], pool)
        assert client._lives == 1
        client.lost = False
        client._wake.set()
        until(lambda: client._lives == 2 and client.peer is not None, "it is attached again")
        client.close()


@pytest.mark.multiproc
def test_a_process_whose_pool_cannot_be_reached_is_let_go_of(
    kept: tuple[Child, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise ConfigError("this host has no such transport")

    class Counted(RpcClient):
        closed = False

        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            clients.append(self)

        def close(self) -> None:
            super().close()
            self.closed = True

    clients: list[Counted] = []
    with MemPool(LAYOUT, hbm="1MiB") as pool:
        monkeypatch.setattr(pool, "connect", refuse)
        monkeypatch.setattr(pool_client, "RpcClient", Counted)
        client = PoolClient(kept[1], pool)
        until(lambda: len(clients) > 2, "it is looked for again")
        client.close()
    assert all(one.closed for one in clients)


@pytest.mark.multiproc
def test_a_question_whose_turn_comes_too_late_tells_nothing_of_the_process(kept: tuple[Child, str]) -> None:
    with MemPool(LAYOUT, hbm="1MiB") as pool:
        client = PoolClient(kept[1], pool, wait_s=0.0)
        question = client.ask(b"late", np.arange(16, dtype=np.int32), 0, bytes(16))
        until(lambda: question.num_tokens == 0)
        assert client.present
        client.close()


def pair(**more: Any) -> tuple[House, House]:
    here, there = f"p-{os.getpid()}", f"d-{os.getpid()}"
    return (
        House(role="kv_producer", name=here, peers={there: f"shm://{there}"}, **more),
        House(role="kv_consumer", name=there, peers={here: f"shm://{here}"}, **more),
    )


def test_a_pair_hands_kv_over_and_back() -> None:
    prefill, decode = pair()
    first = prefill.run(PROMPT, 1)
    told = first.told  # type: ignore[attr-defined]
    answer = decode.run(PROMPT, 12, kv_transfer_params=told)
    assert answer.cached == 20
    until(lambda: decode.traffic.counters["shipped"] == 1)
    following = [*PROMPT, *answer.output, 1, 2]
    second = prefill.run(following, 1)
    assert second.cached == 32, "the answer's KV came back"
    decode.run(following, 1, kv_transfer_params=second.told)  # type: ignore[attr-defined]
    until(lambda: decode.traffic.counters["shipped"] == 2)
    settle(prefill, decode)
    prefill.scheduler.close()
    decode.scheduler.close()


EVERY_STEP = pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])


@pytest.mark.multiproc
@EVERY_STEP
def test_sigkill_of_the_prefill_engine_at_any_step(stride: int) -> None:
    here, there = f"p-{os.getpid()}", f"d-{os.getpid()}"
    decode = House(role="kv_consumer", name=there, peers={here: f"shm://{here}"}, wait_s=FOR_EVER, blocks=512)
    told, died, number = None, 0, 1
    while True:
        prefill = PeerEngine(role="kv_producer", name=here, peers={there: f"shm://{there}"})
        prompt = [number, *PROMPT]
        told, went = prefill.ask(prompt, die_at=number)
        if went is None:
            died += 1
            assert len(decode.run(prompt, 6, kv_transfer_params=told).output) == 6
            prefill.close()
            settle(decode)
            number += stride
            continue
        after = decode.run(prompt, 6, kv_transfer_params=told)
        assert after.cached == 20, "an engine that lives is of use again"
        break
    assert died * stride >= went["calls"] - stride
    prefill.close()
    settle(decode)
    decode.scheduler.close()


@pytest.mark.multiproc
@EVERY_STEP
def test_sigkill_of_the_decode_engine_at_any_step(stride: int) -> None:
    here, there = f"p-{os.getpid()}", f"d-{os.getpid()}"
    prefill = House(role="kv_producer", name=here, peers={there: f"shm://{there}"}, blocks=512)
    number, went = 1, None
    while went is None:
        decode = PeerEngine(role="kv_consumer", name=there, peers={here: f"shm://{here}"})
        prompt = [number, *PROMPT]
        first = prefill.run(prompt, 1)
        _, went = decode.ask(prompt, max_tokens=6, params=first.told, die_at=number)  # type: ignore[attr-defined]
        if went is None:
            decode.close()
            settle(prefill)
            number += stride
    assert went["cached"] == 20
    following = [*prompt, *went["output"], 1]
    until(lambda: prefill.run(following, 1).cached == 28, "the answer's KV came back")
    decode.close()
    settle(prefill)
    prefill.scheduler.close()


def test_kv_that_a_stranger_announced_and_that_never_comes_is_computed_after_wait_s() -> None:
    decode = House(role="kv_consumer", name=f"d-{os.getpid()}", peers={"gone": "shm://gone"}, wait_s=0.2)
    for tag in ("00" * 12, "no hex", 7):
        params: dict[str, Any] = {"from": "stranger", "tag": tag}
        assert decode.run([*PROMPT, len(str(tag))], 3, kv_transfer_params=params).cached in (0, 20)
    assert decode.traffic.counters["missed"] == 1
    decode.scheduler.close()


@pytest.mark.parametrize("wrong", [[], {}, 7])
def test_names_of_peers_that_are_no_names_harm_nobody(wrong: Any) -> None:
    house = House(name=f"n-{os.getpid()}", peers={"gone": "shm://gone"}, wait_s=0.01)
    for key in ("from", "send_to"):
        assert house.run(PROMPT, 3, kv_transfer_params={key: wrong, "tag": "00" * 12}).cached in (0, 20)
    settle(house)
    house.scheduler.close()


@pytest.mark.parametrize("epoch", [{}, {"epoch": "5eed"}, {"epoch": "no hex"}, {"epoch": 7}])
def test_kv_of_a_peer_that_is_gone_is_not_waited_for(epoch: dict[str, Any]) -> None:
    decode = House(role="kv_consumer", name=f"d-{os.getpid()}", peers={"gone": "shm://gone"}, wait_s=FOR_EVER)
    params = {"from": "gone", "tag": "00" * 12, **epoch}
    assert decode.run(PROMPT, 3, kv_transfer_params=params).cached == 0
    assert decode.traffic.counters["missed"] == 1
    decode.scheduler.close()


def test_kv_that_a_former_life_of_a_peer_announced_is_not_waited_for() -> None:
    prefill, decode = pair(wait_s=FOR_EVER)
    told = prefill.run(PROMPT, 1).told  # type: ignore[attr-defined]
    assert decode.run(PROMPT, 3, kv_transfer_params=told).cached == 20
    settle(prefill, decode)
    prefill.scheduler.close()
    again = House(role="kv_producer", name=told["from"], peers=prefill.traffic._peers)
    other = [*range(40, 60)]
    assert decode.run(other, 3, kv_transfer_params={**told, "tag": "00" * 12}).cached == 0
    assert decode.run([1, *PROMPT], 3, kv_transfer_params=again.run([1, *PROMPT], 1).told).cached == 20  # type: ignore[attr-defined]
    settle(again, decode)
    again.scheduler.close()
    decode.scheduler.close()


def test_a_hand_over_that_failed_while_its_peer_started_anew_is_owned_up_to() -> None:
    here, there = f"p-{os.getpid()}", f"d-{os.getpid()}"
    prefill = House(role="kv_producer", name=here, peers={there: f"shm://{there}"})
    told = prefill.run(PROMPT, 1).told  # type: ignore[attr-defined]
    until(lambda: prefill.traffic.counters["ship_failed"] == 1)
    decode = House(role="kv_consumer", name=there, peers={here: f"shm://{here}"}, wait_s=FOR_EVER)
    assert decode.pool.address, "it listens"
    assert decode.run(PROMPT, 3, kv_transfer_params=told).cached == 0
    settle(prefill, decode)
    prefill.scheduler.close()
    decode.scheduler.close()


def test_one_timer_looks_for_all_peers_that_are_to_hear_of_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[Callable[[], None]] = []

    class Timer:
        def __init__(self, after_s: float, look: Callable[[], None]) -> None:
            self._look = look

        def start(self) -> None:
            timers.append(self._look)

    house = House(name=f"o-{os.getpid()}", peers={"gone": "shm://gone"})
    monkeypatch.setattr(losses.threading, "Timer", Timer)
    subject = house.traffic._losses
    subject._wait_s = FOR_EVER
    for number in range(20):
        subject.add("gone", bytes([number]))
    assert len(timers) == 1
    timers[0]()
    assert len(timers) == 2
    assert len(subject._untold) == 20
    subject._untold = [replace(loss, until=0.0) for loss in subject._untold]
    timers[1]()
    assert len(timers) == 2, "it was too late for them all"
    house.scheduler.close()


def test_a_peer_that_could_keep_nothing_says_so() -> None:
    def broken(*_: Any) -> None:
        raise TransferFailed("this copy fails")

    here, there = f"p-{os.getpid()}", f"d-{os.getpid()}"
    prefill = House(role="kv_producer", name=here, peers={there: f"shm://{there}"}, copy=broken)
    decode = House(role="kv_consumer", name=there, peers={here: f"shm://{here}"}, wait_s=FOR_EVER)
    told = prefill.run(PROMPT, 1).told  # type: ignore[attr-defined]
    assert decode.run(PROMPT, 3, kv_transfer_params=told).cached == 0
    settle(prefill, decode)
    prefill.scheduler.close()
    decode.scheduler.close()


def test_an_abort_while_kv_is_on_its_way_keeps_nothing() -> None:
    prefill, decode = pair()
    told = prefill.run(PROMPT, 1).told  # type: ignore[attr-defined]
    request = decode.request(PROMPT, 5, kv_transfer_params=told)
    decode.engine.add(request)
    decode.scheduler.lookup(request, 0)
    decode.engine.abort(request)
    settle(prefill, decode)
    prefill.scheduler.close()
    decode.scheduler.close()


def test_an_abort_before_it_was_looked_at_keeps_nothing() -> None:
    prefill, decode = pair()
    told = prefill.run(PROMPT, 1).told  # type: ignore[attr-defined]
    until(lambda: prefill.traffic.counters["shipped"] == 1, "it came")
    request = decode.request(PROMPT, 5, kv_transfer_params=told)
    decode.engine.add(request)
    decode.engine.abort(request)
    assert decode.quiet(), "at once: the lease of what came had not ended"
    late = prefill.request([*PROMPT, 1], 1)
    prefill.engine.add(late)
    prefill.engine.abort(late)
    settle(prefill, decode)
    prefill.scheduler.close()
    decode.scheduler.close()


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 60), *(pytest.param(seed, 500, marks=pytest.mark.slow) for seed in range(1, 4))]
)
def test_a_storm_of_hand_overs_and_aborts_leaves_no_pin(seed: int, count: int) -> None:
    rng, (prefill, decode) = random.Random(seed), pair(blocks=512)
    live: dict[Request, House] = {}
    started = hits = 0
    while started < count or live:
        if started < count and len(live) < 8:
            prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
            live[prefill.request(prompt, 1)] = prefill
            prefill.engine.add(list(live)[-1])
            started += 1
        if live and rng.random() < 0.2:
            request = rng.choice(list(live))
            live.pop(request).engine.abort(request)
        for request in [*prefill.engine.step(), *decode.engine.step()]:
            if live.pop(request) is prefill and request.told is not None:  # type: ignore[attr-defined]
                following = decode.request(request.prompt_token_ids, 6, kv_transfer_params=request.told)  # type: ignore[attr-defined]
                live[following] = decode
                decode.engine.add(following)
            hits += request.cached or 0
    assert hits > 0
    settle(prefill, decode)
    for house in (prefill, decode):
        assert house.traffic.counters["ship_failed"] == 0
        house.scheduler.close()


def test_a_name_that_is_no_peer_keeps_kv_here() -> None:
    house = House(peers={"a": "shm://a"}, name=f"n-{os.getpid()}")
    done: Request = house.run(PROMPT, 1, kv_transfer_params={"send_to": "b"})
    assert done.told is None  # type: ignore[attr-defined]
    house.idle()
    house.scheduler.close()


def test_settings_that_cannot_be_are_refused_by_name() -> None:
    for extra, setting in (({"sise": 1}, "sise"), ({"wait_s": 0}, "wait_s"), ({"peers": {"a": "shm://a"}}, "name")):
        with pytest.raises(ConfigError, match=setting):
            ConnectorConfig.of(extra)
    with pytest.raises(ConfigError, match="peers"):
        check_role("kv_producer", {}, None)
    with pytest.raises(ConfigError, match="kv_role"):
        check_role(None, {}, None)
