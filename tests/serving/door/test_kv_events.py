"""C30: a door that has just started knows what instances hold, from themselves; and what they gave up."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace
from ref_door import World
from ref_instance import BLOCK, FakeInstance
from ref_waiting import until

from poolweave.index.events.wire import BlockStored, encode_batch, encode_sequence
from poolweave.serving.tenant_quota import salt_of
from poolweave.types import Role

PROMPTS = [[10 + (n * 37 + at * at) % 80 for at in range(4 * BLOCK)] for n in range(50)]


def hits(world: World) -> float:
    return float(world.client.get("/deployment").json()["hit_ratio"])


def believed(world: World, prompt: list[int], salt: bytes = b"") -> dict[str, int]:
    """Blocks that the door's trees credit each colocated instance with."""
    scheduler, links = world.door._houses.first.scheduler, world.door._houses.first.links
    ns = world.door._houses.first.dispatcher._namespace(salt)
    slots = scheduler.fleet.of(Role.COLOCATED)
    held = scheduler.holdings.held_tokens(scheduler.holdings.keys(prompt, ns), slots, (Role.COLOCATED,))
    names = [scheduler.fleet.slots.name(int(slot)) for slot in slots]
    assert set(names) == {linked.link.name for linked in links.linked}
    return dict(zip(names, (held // BLOCK).tolist(), strict=True))


def test_what_was_held_before_the_door_came_is_known_and_routed_by(make_world: Callable[..., World]) -> None:
    """100 keys on two nodes: 50 prompts of four blocks, half of them on each."""
    world = make_world(Role.COLOCATED, Role.COLOCATED)
    names = sorted(world.instances)
    for number, prompt in enumerate(PROMPTS):
        world.instances[names[number % 2]].instance.hold(prompt)
    world.restart_door()
    for number, prompt in enumerate(PROMPTS):
        until(lambda n=number, p=prompt: believed(world, p)[names[n % 2]] == 4, "it is known")  # type: ignore[misc]
        assert believed(world, prompt)[names[1 - number % 2]] == 0
    for number, prompt in enumerate(PROMPTS[:6]):
        assert world.post(prompt=[*prompt, 11], max_tokens=1).status_code == 200
        sent = {name: [seen[:-1] for _, seen in world.instances[name].instance._seen] for name in names}
        (asked,) = (name for name in names if prompt in sent[name])
        assert asked == names[number % 2]


def test_evictions_and_tenants_are_told_apart(make_world: Callable[..., World]) -> None:
    world = make_world(Role.COLOCATED)
    instance = world.instances["colocated-0"].instance
    mine = salt_of("", "mine")
    instance.hold(PROMPTS[0])
    instance.hold(PROMPTS[1], mine)
    until(lambda: believed(world, PROMPTS[0]) == {"colocated-0": 4}, "it is known")
    until(lambda: believed(world, PROMPTS[1], mine) == {"colocated-0": 4}, "the tenant's is known")
    assert believed(world, PROMPTS[0], mine) == believed(world, PROMPTS[1]) == {"colocated-0": 0}
    instance._recorder.removed(np.array([2, 3], np.uint64))
    until(lambda: believed(world, PROMPTS[0]) == {"colocated-0": 2}, "its end was given up")


def test_the_deployment_says_whose_events_are_believed(make_world: Callable[..., World]) -> None:
    world = make_world(Role.COLOCATED, Role.COLOCATED)

    def events() -> dict[str, str]:
        found = world.client.get("/deployment").json()["instances"]
        return {one["name"]: one["events"] for one in found}

    assert events() == {"colocated-0": "live", "colocated-1": "live"}
    world.instances["colocated-0"].instance.publisher.close()
    until(lambda: events()["colocated-0"] == "degraded", "nothing is told any more")
    assert events()["colocated-1"] == "live"


def test_an_instance_that_publishes_nothing_is_said_to(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = FakeInstance._welcome
    monkeypatch.setattr(FakeInstance, "_welcome", lambda fake: replace(told(fake), events=None, replay=None))
    world = make_world()
    world.add("quiet", Role.COLOCATED)
    until(lambda: world.usable == 1, "it is linked")
    assert world.client.get("/deployment").json()["instances"][0]["events"] == "none"


@pytest.mark.parametrize(
    "nonsense", [{"cache_salt": "no hex"}, {"block_size": BLOCK - 1}, {"token_ids": [2**40] * BLOCK}]
)
def test_who_tells_nonsense_is_not_believed_and_the_others_are_heard(
    make_world: Callable[..., World], nonsense: dict[str, object]
) -> None:
    world = make_world(Role.COLOCATED, Role.COLOCATED)
    babbles, speaks = (world.instances[f"colocated-{n}"].instance for n in range(2))
    babbles.hold(PROMPTS[0])
    until(lambda: believed(world, PROMPTS[0])["colocated-0"] == 4, "it is known")
    sense = BlockStored(
        block_hashes=[1], parent_block_hash=None, token_ids=list(range(BLOCK)), block_size=BLOCK,
        lora_id=None, medium="GPU", lora_name=None,
    )  # fmt: skip
    payload = encode_batch(0.0, [replace(sense, **nonsense)], None)
    with babbles.publisher._lock:  # as a publisher that does not look at what it is told
        babbles.publisher._pub.send_multipart((b"", encode_sequence(babbles.publisher._sequence), payload))
        babbles.publisher._sequence += 1
    until(lambda: believed(world, PROMPTS[0])["colocated-0"] == 0, "it is forgotten")
    speaks.hold(PROMPTS[1])
    until(lambda: believed(world, PROMPTS[1])["colocated-1"] == 4, "the other one is heard")
