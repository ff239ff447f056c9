"""An engine in a process of its own, driven by JSON lines: `python ref_transfer_peer.py '<settings>'`.

Commands: offer, grow (offer what is not computed, its first layers sealed), play (a scene), receive, hold (pulls stop
at their first byte and say so), stats, quit. Every line gets a line back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from ref_block_store import ReferenceStore
from ref_transfer_scenes import SCENES
from ref_transfer_world import Node

from poolweave.errors import PoolweaveError
from poolweave.transfer import KVLayout, Shipment, TransferConfig, TransferEngine
from poolweave.transfer.transports.nixl import NixlSource
from poolweave.transfer.transports.shm import MappedSource
from poolweave.transfer.transports.tcp import TcpSource

LARGE = KVLayout(num_layers=4, kv_heads=8, head_dim=64)  # 128 KiB a block


class PeerProcess:
    """The parent's handle: kill() is a real SIGKILL. `prefix` goes before the command."""

    def __init__(self, *, prefix: Sequence[str] = (), **settings: Any) -> None:
        command = [*prefix, sys.executable, __file__, json.dumps(settings)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self.read()["address"]

    def ask(self, command: str, **arguments: Any) -> Any:
        self.tell(command, **arguments)
        return self.read()

    def tell(self, command: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self._process.stdin.flush()

    def read(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # NIXL logs to the same stream
                return json.loads(line)
        raise AssertionError("the peer process ended")

    def kill(self) -> None:
        self._process.kill()
        self._reap()

    def end(self) -> None:
        """SIGKILL, not waited for: kill() still reaps."""
        self._process.kill()

    def quit(self) -> None:
        self.tell("quit")
        self._reap()

    def _reap(self) -> None:
        self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def usage() -> dict[str, int]:
    """Threads, descriptors and resident bytes of this process."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "fds": len(os.listdir("/proc/self/fd")),
        "resident": resident,
    }


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)  # noqa: T201


def hold_pulls() -> None:
    for kind in (MappedSource, NixlSource, TcpSource):

        def held(source: Any, slice_: Any) -> Any:
            say(event="pulling")
            threading.Event().wait()  # for ever: until killed

        kind.pull = held  # type: ignore[method-assign]


def serve(name: str, parent: dict[str, str], **settings: Any) -> None:
    store = ReferenceStore(LARGE, 64)
    engine = TransferEngine(name, store, TransferConfig(**settings))
    engine.connect(parent["name"], parent["address"])
    say(address=engine.address)
    for line in sys.stdin:
        order = json.loads(line)
        command = order.pop("command")
        if command == "quit":
            break
        if command == "hold":
            hold_pulls()
            say(ok=True)
        elif command == "offer":
            blocks = store.make(order["n"], order.get("seed", 0))
            shipment = Shipment(blocks=blocks, num_tokens=16 * order["n"], tag=order["tag"].encode())
            engine.offer(parent["name"], shipment)
            say(sum=int(sum(store.view(one).astype(np.int64).sum() for one in blocks.tolist())))
        elif command == "grow":
            blocks = store.alloc(order["n"])
            store.fill(blocks, order.get("seed", 0))
            shipment = Shipment(blocks=blocks, num_tokens=16 * order["n"], tag=order["tag"].encode(), growing=True)
            growing = engine.offer(parent["name"], shipment)
            for layer in range(order["layers"]):
                store.seal(blocks, layer + 1)
                growing.ready(layer + 1)
            say(sum=int(sum(store.view(one).astype(np.int64).sum() for one in blocks.tolist())))
        elif command == "play":
            with suppress(PoolweaveError):
                SCENES[order["scene"]](Node(engine, store), parent["name"], parent["address"])
            say(ended=True)
        elif command == "receive":
            try:
                with engine.receive(order["tag"].encode(), 20) as got:
                    say(sum=int(sum(store.view(one).astype(np.int64).sum() for one in got.blocks.tolist())))
            except PoolweaveError as error:
                say(error=type(error).__name__)
        else:
            say(in_use=store.in_use(), **usage())
    engine.close()
    store.close()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    serve(**json.loads(sys.argv[1]))
