"""C29: KV goes to where prompts are about to: fetched for one of them, or copied before its holders are overrun."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ref_door import TIMES, World
from ref_instance import answer_of
from ref_waiting import until
from ref_words import text_of

from poolweave.scheduler.cost_model import ArchitectureModel, DecodeStep
from poolweave.serving.door.config import RoutingConfig
from poolweave.types import Role

BOTH = (Role.COLOCATED, Role.COLOCATED)
SHARED = [5 + n % 40 for n in range(66)]  # four whole blocks of 16, and two tokens
SLOW = ArchitectureModel(constant_s=3.0, linear_s=0.1, decode=DecodeStep(constant_s=0.001))


def prompt(number: int) -> list[int]:
    return [*SHARED[:64], 7 + number, 9, 11 + number]


def cached(answer: Any) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_hot_prefix_is_copied_once_to_who_lacks_it(make_world: Callable[..., World]) -> None:
    world = make_world(*BOTH, routing=RoutingConfig(cost=SLOW))
    for number in range(6):
        assert world.post(prompt=prompt(number), max_tokens=2).status_code == 200
    until(lambda: world.client.get("/deployment").json()["copied_tokens"] == 64, "the copy is known")
    (target,) = world.log("Copy")
    held = {one for one, thread in world.instances.items() if any(what == "Copy" for what, _ in thread.instance.log)}
    assert held == set(world.instances) - {target}, "the holder was asked, not the target"


@pytest.mark.parametrize("routing", [{"moves_kv": False}, {"hot_load": 1e9}])
def test_without_need_nothing_is_copied(make_world: Callable[..., World], routing: dict[str, Any]) -> None:
    world = make_world(*BOTH, routing=RoutingConfig(cost=SLOW, **routing))
    for number in range(6):
        assert world.post(prompt=prompt(number), max_tokens=2).status_code == 200
    assert world.log("Copy") == []


def test_a_copy_that_fails_costs_no_request(make_world: Callable[..., World]) -> None:
    world = make_world(*BOTH, routing=RoutingConfig(cost=SLOW, policy="round_robin", hot_load=1e9))
    assert world.post(prompt=prompt(0), max_tokens=2).status_code == 200
    for thread in world.instances.values():
        thread.instance.refuses_copies = True
    for number in range(1, 4):
        assert world.post(prompt=prompt(number), max_tokens=2).status_code == 200
    assert world.log("Copy")
    assert world.client.get("/deployment").json()["copied_tokens"] == 0


def test_a_request_goes_elsewhere_when_its_instance_dies_during_the_fetch(make_world: Callable[..., World]) -> None:
    world = make_world(*BOTH, routing=RoutingConfig(cost=SLOW, policy="round_robin", hot_load=1e9))
    assert world.post(prompt=prompt(0), max_tokens=2).status_code == 200
    (holder,) = (name for name, thread in world.instances.items() if thread.instance.log)
    (target,) = set(world.instances) - {holder}

    def die() -> None:
        world.instances.pop(target).close()
        until(lambda: world.usable == 1, "the door has lost it")

    world.instances[holder].instance.copying = die
    answer = world.post(prompt=prompt(1), max_tokens=2)
    assert world.log("Copy") == [target]
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, text_of(answer_of(prompt(1), 2)))
    assert world.client.get("/deployment").json()["retried"] == 1


def test_a_copy_that_its_target_did_not_survive_is_not_believed_of_its_next_life(
    make_world: Callable[..., World],
) -> None:
    world = make_world(*BOTH, routing=RoutingConfig(cost=SLOW, policy="round_robin", hot_load=1e9))
    assert world.post(prompt=prompt(0), max_tokens=2).status_code == 200
    (holder,) = (name for name, thread in world.instances.items() if thread.instance.log)
    (target,) = set(world.instances) - {holder}

    def live_anew() -> None:
        world.instances.pop(target).close()
        until(lambda: world.usable == 1, "the door has lost it")
        world.add(target, Role.COLOCATED)
        until(lambda: world.usable == 2, "it is back")

    world.instances[holder].instance.copying = live_anew
    assert world.post(prompt=prompt(1), max_tokens=2).status_code == 200
    assert world.log("Copy") == [target]
    assert world.client.get("/deployment").json()["copied_tokens"] == 0


class RealWorld(World):
    """The same over real instances: an engine, a pool and a small random model each, on threads of this process."""

    def add(self, name: str, role: Role, token_s: float = 0.0) -> Any:
        from poolweave.serving.instance.config import InstanceConfig
        from poolweave.serving.instance.process import Instance

        config = InstanceConfig(
            name=f"{name}-real", role=role, model=str(self.folder), hbm="16MiB", registry=self.coordinator.address,
            membership=TIMES,
        )  # fmt: skip
        made = Served(Instance(config))
        self.instances[config.name] = made
        return made

    def hold(self, open_: bool = False) -> None:
        """Nothing holds a real one."""

    def holder_of(self, tokens: list[int]) -> dict[str, int]:
        """Tokens that each pool really has of a prompt."""
        found = {}
        for name, made in self.instances.items():
            (station,) = made.instance._stations
            ns = station.pool.namespace(station._model.identity)
            with station.pool.match(tokens, ns) as hit:
                found[name] = hit.num_tokens
        return found


class Served:
    """A real instance on a thread."""

    def __init__(self, instance: Any) -> None:
        import threading

        self.instance = instance
        self._thread = threading.Thread(target=instance.serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.instance.stop()
        self._thread.join()
        self.instance.close()


@pytest.fixture
def real_world(tmp_path: Path) -> Iterator[Callable[..., RealWorld]]:
    pytest.importorskip("torch")
    from ref_transformers import save_random_model, save_tokenizer

    RealWorld.folder = save_tokenizer(save_random_model("llama", tmp_path / "model"))
    made: list[RealWorld] = []

    def make(**routing: Any) -> RealWorld:
        made.append(RealWorld(RealWorld.folder, BOTH, routing=RoutingConfig(cost=SLOW, **routing), flow="colocated"))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.mark.engine
@pytest.mark.multiproc
@pytest.mark.timeout(300)
def test_real_instances_copy_a_hot_prefix_and_answer_from_the_copy(real_world: Callable[..., RealWorld]) -> None:
    world = real_world()
    answers = [world.post(prompt=prompt(number), max_tokens=4, ignore_eos=True, temperature=0) for number in range(6)]
    assert [cached(answer) for answer in answers] == [0, 64, 64, 64, 64, 64]
    until(lambda: all(held >= 64 for held in world.holder_of(SHARED[:64]).values()), "both pools have it")
    computed = answers[0].json()["choices"][0]["text"]
    first = next(iter(world.instances))
    world.instances.pop(first).close()
    until(lambda: world.usable == 1, "the other is alone")
    (name,) = world.instances
    before = world.holder_of(prompt(0))[name]
    again = world.post(prompt=prompt(0), max_tokens=4, ignore_eos=True, temperature=0)
    assert cached(again) == before == 64
    assert again.json()["choices"][0]["text"] == computed


@pytest.mark.engine
@pytest.mark.multiproc
@pytest.mark.timeout(300)
def test_real_instances_fetch_what_another_computed(real_world: Callable[..., RealWorld]) -> None:
    world = real_world(policy="round_robin", hot_load=1e9)
    one = world.post(prompt=prompt(0), max_tokens=4, ignore_eos=True, temperature=0, cache_salt="a")
    other = world.post(prompt=prompt(0), max_tokens=4, ignore_eos=True, temperature=0, cache_salt="a")
    assert (cached(one), cached(other)) == (0, 64), "it ran elsewhere, on KV that was moved there"
    assert other.json()["choices"][0]["text"] == one.json()["choices"][0]["text"]
    assert world.client.get("/deployment").json()["copied_tokens"] == 64
    assert cached(world.post(prompt=prompt(0), max_tokens=4, ignore_eos=True, temperature=0, cache_salt="b")) == 0, (
        "another's is not"
    )
