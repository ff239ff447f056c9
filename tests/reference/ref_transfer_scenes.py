"""What a sender does so that each message of the protocol crosses, by name: also in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ref_transfer_world import Node
from ref_waiting import until

from poolweave.transfer import Shipment, Transfer
from poolweave.types import UInt64Array

BLOCKS = 4
TAG = b"scene"
SCENE_S = 60.0  # longer than any lease
ANSWER_S = 2.0


def send(node: Node, peer: str, address: str) -> None:
    node.engine.offer(peer, node.shipment(BLOCKS, tag=TAG)).result(SCENE_S)


def grow(node: Node, peer: str, address: str) -> None:
    """Each layer is a stretch of its own, told when the one before it is over there."""
    transfer, blocks = _begin_growing(node, peer)
    for layer in range(node.store.layout.num_layers):
        until(lambda layer=layer: transfer.progress * node.store.layout.num_layers > layer - 1 or transfer.done())
        node.store.seal(blocks, layer + 1)
        transfer.ready(layer + 1)
    transfer.result(SCENE_S)


def cancel(node: Node, peer: str, address: str) -> None:
    """Of an offer that has arrived: messages keep their order, and one behind it was answered."""
    transfer, _ = _begin_growing(node, peer)
    reserve(node, peer, address)
    transfer.cancel()
    transfer.result(SCENE_S)  # raises what it ended with


def repeat(node: Node, peer: str, address: str) -> None:
    """A tag that is taken is refused."""
    send(node, peer, address)
    send(node, peer, address)


def reserve(node: Node, peer: str, address: str) -> None:
    node.engine.unreserve(node.engine.reserve(peer, BLOCKS, timeout=ANSWER_S))


def mistake(node: Node, peer: str, address: str) -> None:
    """Another lives at the address."""
    node.engine.connect("stranger", address)
    node.engine.offer("stranger", node.shipment(BLOCKS)).result(SCENE_S)


def _begin_growing(node: Node, peer: str) -> tuple[Transfer, UInt64Array]:
    blocks = node.store.alloc(BLOCKS)
    node.store.fill(blocks, 5)
    num_tokens = BLOCKS * node.store.layout.block_tokens
    return node.engine.offer(peer, Shipment(blocks=blocks, num_tokens=num_tokens, tag=TAG, growing=True)), blocks


SCENES: Mapping[str, Callable[[Node, str, str], None]] = {
    one.__name__: one for one in (send, grow, cancel, repeat, reserve, mistake)
}
