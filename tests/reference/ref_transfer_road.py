"""A sender and a receiver with a frame proxy before each of them; one step of the protocol is struck on the way."""

from __future__ import annotations

import random
import socket
import threading
from contextlib import suppress
from typing import Any

from ref_block_store import ReferenceStore
from ref_frame_proxy import FrameProxy, Strike
from ref_transfer_peer import PeerProcess
from ref_transfer_scenes import SCENES, TAG
from ref_transfer_world import LAYOUT, Node, same_kv
from ref_waiting import until

from poolweave.errors import PoolweaveError, TransferTimeout
from poolweave.transfer import KVLayout, TransferConfig, TransferEngine

Step = tuple[str, str]  # the connection, and what crosses it


def free_port() -> int:
    """Below those that the kernel gives to connections: it stays free until it is listened on."""
    while True:
        port = random.randrange(20000, 32000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Road:
    """From a sender to a receiver over TCP, a proxy before each of them: control goes one way, data the other.

    The one that lives is in this process: both, or the one that is not `dies`, which is in a process of its own.
    """

    def __init__(self, step: Step, strike: Strike, dies: str = "", layout: KVLayout = LAYOUT, **settings: Any) -> None:
        self._settings = {"stall_s": 0.3, "lease_s": 0.5, "connect_timeout_s": 0.5, **settings}
        self._layout, self._dies = layout, dies
        self._ports = {"sender": free_port(), "receiver": free_port()}
        self._nodes: dict[str, Node] = {}
        self._step = step
        struck = {step[0]: strike}
        other = self._open("other", 0) if step == ("data", "refused") else None
        data_port = int(other.engine.address.rpartition(":")[2]) if other is not None else self._ports["sender"]
        self._data = FrameProxy(("127.0.0.1", data_port), struck.get("data"))
        self._control = FrameProxy(("127.0.0.1", self._ports["receiver"]), struck.get("control"))
        self.address = f"tcp://127.0.0.1:{self._control.port}"
        for name in ("sender", "receiver"):
            if name != dies:
                self._open(name, self._ports[name])
        self.peer: PeerProcess | None = None
        if dies:
            self._start_peer()
        if dies != "sender":
            self.node("sender").engine.connect("receiver", self.address)

    def node(self, name: str) -> Node:
        return self._nodes[name]

    def _where(self, name: str, port: int) -> dict[str, str]:
        own = {"listen": f"tcp://127.0.0.1:{port}"}
        return {**own, "advertise": f"tcp://127.0.0.1:{self._data.port}"} if name == "sender" else own

    def _open(self, name: str, port: int) -> Node:
        store = ReferenceStore(self._layout, 64)
        config = TransferConfig(**self._where(name, port), **self._settings)  # type: ignore[arg-type]
        self._nodes[name] = Node(TransferEngine(name, store, config), store)
        return self._nodes[name]

    def _start_peer(self) -> None:
        parent = {"name": "receiver" if self._dies == "sender" else "sender", "address": self.address}
        where = self._where(self._dies, self._ports[self._dies])
        self.peer = PeerProcess(name=self._dies, parent=parent, **where, **self._settings)

    @property
    def struck(self) -> threading.Event:
        return (self._data if self._step[0] == "data" else self._control).struck

    def play(self, scene: str) -> PoolweaveError | None:
        """What it ended with at the sender."""
        try:
            SCENES[scene](self.node("sender"), "receiver", self.address)
        except PoolweaveError as error:
            return error
        return None

    def take(self, expected: Any = None) -> None:
        """What came, if anything did, is whole; nothing stays of it."""
        receiver = self.node("receiver")
        try:
            with receiver.engine.receive(TAG, 0.0) as got:
                if expected is not None:
                    assert same_kv(self.node("sender"), expected, receiver, got.blocks)
        except PoolweaveError:
            pass
        self.come_to_rest()

    def come_to_rest(self) -> None:
        """All leases are over: every block is back."""
        for name, node in self._nodes.items():
            until(lambda node=node: sum(node.store.loans.values()) == 0, f"what {name} lent")
        if "receiver" in self._nodes:
            until(lambda: self.node("receiver").store.in_use() == 0, "what the receiver had placed")

    def works(self) -> bool:
        """A transfer goes well, with the bytes as they were."""
        sender, receiver = self.node("sender"), self.node("receiver")
        shipment = sender.shipment(2, seed=9, tag=b"after", lease_s=30.0)
        try:
            sender.engine.offer("receiver", shipment).result(60)
        except TransferTimeout:
            raise
        except PoolweaveError:
            return False  # the connection's loss is seen only now
        with receiver.engine.receive(b"after", 30) as got:
            return same_kv(sender, shipment.blocks, receiver, got.blocks)

    def heal(self) -> None:
        """No fault is left: the next transfer but one goes well, at the latest."""
        self._data._target = ("127.0.0.1", self._ports["sender"])
        assert self.works() or self.works() or self.works()
        self.come_to_rest()

    def replace_the_dead(self) -> None:
        assert self.peer is not None
        self.peer.kill()
        self._open(self._dies, self._ports[self._dies])
        self.node("sender").engine.connect("receiver", self.address)

    def __enter__(self) -> Road:
        return self

    def __exit__(self, *_: object) -> None:
        if self.peer is not None:
            self.peer.kill()
        for proxy in (self._control, self._data):
            proxy.close()
        for node in self._nodes.values():
            node.engine.close()
            node.engine.check()
            node.store.check()
            node.store.close()
