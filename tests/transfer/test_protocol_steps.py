"""Kill, stall, cut and corrupt at every step of the protocol, which its own message table names.

A new message makes new steps: without a scene in which it crosses, they fail. Wherever a fault falls, it ends in a
typed error or in right bytes, in time; both sides get every block back, and the next transfer goes well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, get_args

import pytest
from ref_frame_proxy import DATA_FRAMES, Strike
from ref_transfer_peer import LARGE
from ref_transfer_road import Road, Step
from ref_transfer_world import LAYOUT
from ref_waiting import until

from poolweave.transfer import messages


def names(union: Any) -> list[str]:
    return [str(one.__struct_config__.tag) for one in get_args(union)]


CONTROL = ["hello", *names(messages.Reply), *names(messages.Request), *names(messages.Answer)]
DATA = ["data", *names(messages.Reply), *DATA_FRAMES.values()]
STEPS: list[Step] = [*(("control", one) for one in CONTROL), *(("data", one) for one in DATA)]

# The scenes in which a step happens, and how often it does before the one that is struck.
PLAYED: Mapping[Step, Mapping[str, int]] = {
    ("control", "hello"): {"send": 0},
    ("control", "welcome"): {"send": 0},
    ("control", "refused"): {"mistake": 0},
    ("control", "offer"): {"send": 0, "grow": 0},
    ("control", "ready"): {"grow": LAYOUT.num_layers - 1},
    ("control", "cancel"): {"cancel": 0},
    ("control", "reserve"): {"reserve": 0},
    ("control", "unreserve"): {"reserve": 0},
    ("control", "confirm"): {"send": 0, "grow": 0},
    ("control", "progress"): {"grow": 0},
    ("control", "failed"): {"repeat": 0},
    ("control", "reserved"): {"reserve": 0},
    ("data", "data"): {"send": 0, "grow": 0},
    ("data", "welcome"): {"send": 0, "grow": 0},
    ("data", "refused"): {"send": 0, "grow": 0},
    ("data", "request"): {"send": 0, "grow": LAYOUT.num_layers - 1},
    ("data", "chunk"): {"send": 0, "grow": LAYOUT.num_layers - 1},
}
PLAYS = [(step, scene, skip) for step in STEPS for scene, skip in PLAYED.get(step, {"": 0}).items()]
every_step = pytest.mark.parametrize(("step", "scene", "skip"), PLAYS, ids=["-".join((*s, n)) for s, n, _ in PLAYS])
QUICK = ("ready", "progress", "confirm", "chunk")  # killed at in every run, in growing transfers; the others are slow


def killed(plays: list[tuple[Step, str, int]]) -> list[Any]:
    return [
        pytest.param(*play, id="-".join((*play[0], play[1])), marks=() if quick else pytest.mark.slow)
        for play in plays
        for quick in [play[1] == "grow" and play[0][1] in QUICK]
    ]


PLACES: dict[str, Callable[[int], int]] = {
    "before": lambda _: 0,
    "head": lambda _: 6,
    "middle": lambda length: 28 + (length - 28) // 2 if length > 40 else length // 2,
    "last": lambda length: length - 1,
}


def test_every_message_has_a_scene() -> None:
    assert not [step for step in STEPS if step not in PLAYED], "give them a scene in which they cross"
    assert set(PLAYED) <= set(STEPS)
    every = {*names(messages.Message)}
    assert every == {*CONTROL, *DATA} - {*DATA_FRAMES.values()}


@every_step
@pytest.mark.parametrize("place", PLACES)
def test_cut(step: Step, scene: str, skip: int, place: str) -> None:
    with Road(step, Strike("cut", step[1], PLACES[place], skip)) as road:
        road.play(scene)
        until(road.struck.is_set, f"{step} crosses", 10)
        road.take()
        road.heal()


@every_step
@pytest.mark.parametrize("place", PLACES)
def test_corrupt(step: Step, scene: str, skip: int, place: str) -> None:
    with Road(step, Strike("corrupt", step[1], PLACES[place], skip)) as road:
        road.play(scene)
        until(road.struck.is_set, f"{step} crosses", 10)
        road.take()
        road.heal()


@every_step
def test_stall(step: Step, scene: str, skip: int) -> None:
    """A connection that says nothing more is given up with the lease; whoever knows better connects again."""
    with Road(step, Strike("stall", step[1], PLACES["middle"], skip)) as road:
        road.play(scene)
        until(road.struck.is_set, f"{step} crosses", 10)
        road.take()
        road.node("sender").engine.disconnect("receiver")
        road.node("sender").engine.connect("receiver", road.address)
        road.heal()


@pytest.mark.multiproc
@pytest.mark.parametrize(("step", "scene", "skip"), killed(PLAYS))
@pytest.mark.parametrize("dies", ["sender", "receiver"])
def test_kill(step: Step, scene: str, skip: int, dies: str) -> None:
    """A real SIGKILL when half of the message is through: the other one gets its blocks back and serves the next."""
    dead = threading.Event()

    def kill() -> None:
        assert road.peer is not None
        road.peer.end()
        dead.set()

    strike = Strike("kill", step[1], PLACES["middle"], skip, kill)
    with Road(step, strike, dies, LARGE) as road:
        assert road.peer is not None
        if dies == "sender":
            road.peer.tell("play", scene=scene)
        else:
            road.play(scene)
        assert dead.wait(30), f"{step} crosses"
        road.come_to_rest()
        road.replace_the_dead()
        road.heal()
