"""Settings and addresses: what is refused at once, and by which name. C25, C26."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from ref_block_store import ReferenceStore
from ref_transfer_world import LAYOUT, World, same_kv

from poolweave.errors import AddressInUse, ConfigError, ProtocolError
from poolweave.transfer import TransferConfig, TransferEngine
from poolweave.transfer.addresses import Address


@pytest.mark.parametrize("text", ["tcp://127.0.0.1:80", "tcp://[::1]:0", "shm://decode-0", "inproc://x"])
def test_addresses_come_back_as_they_were(text: str) -> None:
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "decode-0",
        "rdma://x:1",
        "tcp://host",
        "tcp://:5",
        "tcp://h:70000",
        "tcp://h:x",
        "shm://",
        "shm://" + "n" * 81,
    ],
)
def test_bad_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Address.parse(text)


@pytest.mark.parametrize(
    "settings",
    [
        {"lease_s": 0}, {"stall_s": -1.0}, {"connect_timeout_s": 1e7}, {"pull_workers": 0}, {"connections": 65},
        {"copy_threads": 0}, {"max_in_flight_bytes": 0}, {"secret": b"short"}, {"secret": "a" * 16},
        {"advertise": "shm://x"}, {"listen": "foo://x"}, {"listen": "tcp://127.0.0.1:99999"}, {"listen": []},
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TransferConfig(**settings)


@pytest.mark.parametrize("listen", ["rdma", "rdma://x", ["shm", "rdma"], [], ["shm", "shm"], "udp://1.2.3.4:5"])
def test_transports_that_are_not_there_are_refused_at_start(listen: Any) -> None:
    """C25: an explicit choice never falls back."""
    store = ReferenceStore(LAYOUT)
    with pytest.raises(ConfigError):
        TransferEngine("x", store, TransferConfig(listen=listen))
    store.close()


def test_auto_falls_back_once_and_shows_it(make_world: Any, caplog: pytest.LogCaptureFixture) -> None:
    """C25: of several addresses the first that answers is taken; what was asked and what is used are visible."""
    world: World = make_world("shm")
    a, b = world.node(listen=["shm", "tcp"]), world.node(listen=["shm", "tcp"])
    a.engine.connect(b.name, b.engine.addresses)
    a.engine.offer(b.name, a.shipment(1)).result(10)
    assert a.engine.stats().sending.transports[b.name] == ("auto", "shm")
    a.engine.connect(b.name, ["shm://somewhere-else", b.engine.addresses["tcp"]])
    shipment = a.shipment(1, tag=b"f")
    a.engine.offer(b.name, shipment).result(10)
    assert a.engine.stats().sending.transports[b.name] == ("auto", "tcp")
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    with b.engine.receive(b"f", 10) as got:
        assert same_kv(a, shipment.blocks, b, got.blocks)


def test_an_address_over_a_transport_that_we_do_not_speak_is_refused(make_world: Any) -> None:
    a = make_world("shm").node()
    with pytest.raises(ConfigError, match="add one of theirs to listen"):
        a.engine.connect("b", "tcp://127.0.0.1:1")


def test_a_taken_port_or_name_is_told_with_its_setting() -> None:
    """C26."""
    store = ReferenceStore(LAYOUT)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(AddressInUse) as caught:
            TransferEngine("x", store, TransferConfig(listen=address))
    assert (caught.value.address, caught.value.setting) == (address, "listen")
    with TransferEngine("y", store), pytest.raises(AddressInUse):
        TransferEngine("y", store)
    TransferEngine("y", store).close()  # the name is free again
    store.close()


def test_ten_nodes_at_once_on_port_zero_are_all_up(make_world: Any) -> None:
    """C26."""
    world = make_world("tcp")
    nodes = [world.node() for _ in range(10)]
    assert len({node.engine.address for node in nodes}) == 10
    for other in nodes[1:]:
        nodes[0].engine.connect(other.name, other.engine.address)
        nodes[0].engine.offer(other.name, nodes[0].shipment(1)).result(10)


@pytest.mark.parametrize("listen", ["shm", "tcp"])
def test_secrets_must_agree(make_world: Any, listen: str) -> None:
    world: World = make_world(listen)
    a, b = world.pair(secret=b"0123456789abcdef")
    shipment = a.shipment(2, tag=b"s")
    a.engine.offer(b.name, shipment).result(10)
    with b.engine.receive(b"s", 10) as got:
        assert same_kv(a, shipment.blocks, b, got.blocks)
    for secret in (None, b"another secret!!"):
        stranger = world.node(secret=secret)
        stranger.engine.connect(b.name, b.engine.address)
        with pytest.raises(ProtocolError, match="secret"):
            stranger.engine.offer(b.name, stranger.shipment(1)).result(10)
        assert b.store.in_use() == 0
