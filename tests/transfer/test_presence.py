"""Whether a peer is there: its life while a connection stands, and that it cannot be reached once it does not."""

from __future__ import annotations

import pytest
from ref_transfer_world import World
from ref_waiting import until

from poolweave.errors import UnknownPeer
from poolweave.transfer import Presence


def test_a_peer_is_there_until_it_ends_and_another_life_is_told_apart(world: World) -> None:
    a, b = world.pair()
    until(lambda: a.engine.presence(b.name) == Presence(b.engine.epoch, 0), "it is reached")
    b.engine.close()
    until(lambda: a.engine.presence(b.name).failed_dials > 0, "its end is seen, and that nobody is there now")
    assert a.engine.presence(b.name).epoch == 0


def test_who_was_never_there_cannot_be_reached(world: World) -> None:
    a, _ = world.pair()
    scheme = a.engine.address.split("://")[0]
    if scheme in ("shm", "inproc"):
        a.engine.connect("nobody", f"{scheme}://nobody-of-this-name")
        until(lambda: a.engine.presence("nobody").failed_dials > 0)
    with pytest.raises(UnknownPeer):
        a.engine.presence("a name without an address")
