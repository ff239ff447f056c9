"""SIGKILL of a real engine's pool process, and of its peer, at every step that has a name, and at random ones.

The peer of these tests is a pool process too: it keeps real KV, offers it under a tag, takes what it is handed, and is
there again within a second. Killed engines of a pair are in test_pair.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from engines import BLOCK, FOR_EVER, EngineProcess, ask, prompts
from ref_waiting import until

from poolweave.errors import PeerLost
from poolweave.serving.control.client import RpcClient
from poolweave.serving.pool_process.messages import (
    Attach,
    Attached,
    Fetch,
    PoolReply,
    Sending,
    pool_address,
)
from poolweave.serving.pool_process.service import PoolServiceConfig
from poolweave.serving.process.child import Child, Program
from poolweave.transfer import KVLayout

KEEPER, PEER, ENGINE = (f"deaths-{what}-{os.getpid()}" for what in ("keeper", "peer", "engine"))
LONG = 400  # tokens: more than the short way takes in, so that an offer has all its steps


class Keeper:
    """A pool process that may be killed and started again, and asked as an engine asks it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.child = self._start()

    def greet(self, whereabouts: dict[str, Any]) -> RpcClient:
        client = RpcClient(pool_address(self.name), peer=self.name, replies=PoolReply)
        layout = msgspec.json.decode(whereabouts["layout"], type=KVLayout)
        client.greet(Attach(layout, whereabouts["instance"], whereabouts["addresses"]), Attached, timeout_s=60)
        return client

    def revive(self) -> None:
        self.child.close()
        self.child = self._start()

    def _start(self) -> Child:
        config = PoolServiceConfig(name=self.name, size="64MiB")
        child = Child(Program(self.name, "poolweave.serving.pool_process.service", config))
        child.wait_ready(60)
        return child


class World:
    """An engine with a pool process and a peer."""

    def __init__(self, tiny: Path, plain: EngineProcess) -> None:
        self.plain = plain
        self.keeper, self.peer = Keeper(KEEPER), Keeper(PEER)
        self.engine = EngineProcess(tiny, skip_tokenizer_init=True, pool={
            "size": "64MiB", "pool": KEEPER, "wait_s": FOR_EVER, "name": ENGINE, "peers": {f"pool-{PEER}": f"shm://pool-{PEER}"},
        })  # fmt: skip
        self.about = self.engine.call("whereabouts")
        self.free = self.engine.call("figures")["free"]
        self._client = self.peer.greet(self.about)

    def revive(self) -> None:
        """Both processes live, and the engine knows."""
        if not self.keeper.child.alive:
            self.keeper.revive()
        if not self.peer.child.alive:
            self._client.close()
            self.peer.revive()
            self._client = self.peer.greet(self.about)
        until(lambda: self.engine.call("attached"), "the engine finds the pool process")

    def right(self, *asked: dict[str, Any]) -> list[dict[str, Any]]:
        """The engine's answers, which are vLLM's own."""
        got = self.engine.generate(*asked)
        right = self.plain.generate(*[{**prompt, "params": None} for prompt in asked])
        assert [one["tokens"] for one in got] == [one["tokens"] for one in right]
        return got

    def handed(self, ids: list[int], *, offered: bool = True, dying: bool = False) -> dict[str, Any]:
        """A prompt whose KV the peer promises, and sends if `offered`; one that is `dying` may not live to say so."""
        tag = secrets.token_bytes(12)
        if offered:
            told = np.asarray(ids, "<i4").tobytes()
            fetch = Fetch(tag, bytes.fromhex(self.about["identity"]), told, 0, ENGINE)
            with contextlib.suppress(*[PeerLost] * dying):
                assert self._client.call(fetch, Sending, timeout_s=60).num_tokens == len(ids) // BLOCK * BLOCK
        return ask(ids, max_tokens=8, params={"from": f"pool-{PEER}", "tag": tag.hex()})

    def keep(self, ids: list[int]) -> None:
        """The pool process and the peer have its KV, the engine has not."""

        def kept() -> bool:
            shipped, failed = self._shipped()
            self.right(ask(ids, max_tokens=1, params={"from": f"pool-{PEER}"}))
            until(lambda: sum(self._shipped()) >= shipped + failed + 2, "both have answered")
            return self._shipped()[0] == shipped + 2

        until(kept, "it is kept at both")  # one of them may stand still for longer than a lease
        self.engine.call("drop", ids=ids)

    def settled(self) -> None:
        """Nothing is held, on vLLM's side or ours."""
        until(lambda: self.engine.call("figures")["leased"] == 0, "transfers end")
        figures = self.engine.call("figures")
        assert [figures[name] for name in ("active", "tracks", "steps")] == [0, 0, 0]
        assert figures["free"] == self.free

    def reuse_resumes(self, ids: list[int]) -> None:
        """From the pool process, and from the peer."""
        self.revive()
        self.keep(ids)
        whole = (len(ids) - 1) // BLOCK * BLOCK
        assert self.right(ask(ids))[0]["cached"] == whole
        self.engine.call("drop", ids=ids)
        assert self.right(self.handed(ids))[0]["cached"] == whole
        self.settled()

    def close(self) -> None:
        self._client.close()
        for one in (self.engine, self.keeper.child, self.peer.child):
            one.close()

    def _shipped(self) -> tuple[int, int]:
        """Hand-overs that went well, and that did not."""
        counted = self.engine.call("figures")["traffic"]
        return counted.get("shipped", 0), counted.get("ship_failed", 0)


@pytest.fixture(scope="module")
def world(tiny: Path, plain: EngineProcess) -> Iterator[World]:
    before = set(os.listdir("/dev/shm"))
    made = World(tiny, plain)
    yield made
    made.close()
    left = {name for name in set(os.listdir("/dev/shm")) - before if "poolweave" in name or "deaths" in name}
    assert not left


@pytest.fixture(autouse=True)
def alive(world: World) -> None:
    world.revive()


_source = prompts(70)


def fresh() -> list[int]:
    """A prompt that nobody has seen."""
    ids: list[int] = []
    while len(ids) < LONG:
        ids += next(_source)
    return ids[:LONG]


@pytest.mark.parametrize(
    "step",
    [
        "before the lookup", "once asked", "between offer and pull", "after the pull", "before what came is claimed",
        "before the load", "after the load", "during a save", "before a save is settled", "when the request ends",
        "before its KV is offered", "once its KV is offered",
    ],
)  # fmt: skip
def test_sigkill_of_the_pool_process(world: World, step: str) -> None:
    kept, new, later = fresh(), fresh(), fresh()
    world.keep(kept)
    world.engine.call("strike", pid=world.keeper.child.pid, step=step)
    world.right(ask(kept, max_tokens=20), ask(new, max_tokens=20))
    assert world.engine.call("struck"), step
    world.right(ask(kept), ask(later))
    world.settled()
    world.reuse_resumes(fresh())


@pytest.mark.parametrize("step", ["between offer and pull", "after the pull"])
def test_sigkill_of_a_prefill_peer_that_offers(world: World, step: str) -> None:
    kept = fresh()
    world.keep(kept)
    world.engine.call("strike", pid=world.peer.child.pid, step=step)
    world.right(world.handed(kept, dying=True))
    assert world.engine.call("struck"), step
    world.settled()
    world.reuse_resumes(fresh())


@pytest.mark.parametrize(
    "step",
    [
        "before the lookup", "before what came is claimed", "before the load", "after the load", "during a save",
        "before a save is settled", "when the request ends", "before its KV is offered", "once its KV is offered",
    ],
)  # fmt: skip
def test_sigkill_of_a_prefill_peer_whose_kv_came(world: World, step: str) -> None:
    """From the load on it is the way back that finds nobody."""
    kept = fresh()
    world.keep(kept)
    asked = world.handed(kept)
    world.engine.call("strike", pid=world.peer.child.pid, step=step)
    world.right(asked, ask(fresh(), max_tokens=20))
    assert world.engine.call("struck"), step
    world.settled()
    world.reuse_resumes(fresh())


@pytest.mark.parametrize("step", ["before the lookup", "while it waits"])
def test_sigkill_of_a_prefill_peer_before_its_offer(world: World, step: str) -> None:
    """Its KV would be waited for without end: its death is noticed."""
    asked = world.handed(fresh(), offered=False)
    world.engine.call("strike", pid=world.peer.child.pid, step=step)
    assert world.right(asked)[0]["cached"] == 0
    assert world.engine.call("struck"), step
    world.settled()
    world.reuse_resumes(fresh())


@pytest.mark.parametrize(
    "step",
    [
        "before the lookup", "during a save", "when the request ends", "before its KV is offered",
        "once its KV is offered",
    ],
)  # fmt: skip
def test_sigkill_of_a_decode_peer(world: World, step: str) -> None:
    world.engine.call("strike", pid=world.peer.child.pid, step=step)
    asked = ask(fresh(), max_tokens=1, params={"send_to": f"pool-{PEER}"})
    world.right(asked, ask(fresh(), max_tokens=12))
    assert world.engine.call("struck"), step
    world.settled()
    world.reuse_resumes(fresh())


@pytest.mark.parametrize(("seed", "rounds"), [(0, 4), pytest.param(1, 60, marks=pytest.mark.slow)])
def test_sigkill_of_either_at_random(world: World, seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    for _ in range(rounds):
        kept = [fresh() for _ in range(3)]
        for ids in kept:
            world.keep(ids)
        asked = [
            ask(kept[0], max_tokens=30), ask(fresh(), max_tokens=30), world.handed(kept[1]),
            world.handed(fresh(), offered=False), ask(kept[2], max_tokens=1, params={"send_to": f"pool-{PEER}"}),
        ]  # fmt: skip
        world.engine.send("generate", prompts=asked)
        time.sleep(rng.random() * 0.4)  # where it strikes is left to chance; what must hold is the same everywhere
        for victim in rng.choice(([world.peer], [world.peer, world.keeper], [world.keeper, world.peer])):
            victim.child.kill()  # the peer in any case: what it only promised would be waited for without end
        got = world.engine.answer()["answers"]
        right = world.plain.generate(*[{**prompt, "params": None} for prompt in asked])
        assert [one["tokens"] for one in got] == [one["tokens"] for one in right]
        world.settled()
        world.revive()
    world.reuse_resumes(fresh())
