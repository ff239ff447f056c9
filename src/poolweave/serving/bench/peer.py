"""The other process of the transfer study: pools that receive, and send a block when told. `python -m ...bench.peer`.

Commands and answers are JSON lines on stdin and stdout; it ends when its stdin does, so with its parent.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from poolweave.errors import PeerLost, PoolweaveError
from poolweave.mempool import MemPool, PoolConfig
from poolweave.serving.bench.usage import Usage
from poolweave.transfer import KVLayout, TransferConfig
from poolweave.transfer.layout import Order

_SEND_TIMEOUT_S = 60.0
_PATIENCE_S = 120.0  # a machine that stands still meanwhile does not end a study of minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """A pool on both sides of the study."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    order: Order
    num_blocks: int
    transport: str
    connections: int
    checksums: bool

    def open(self) -> MemPool:
        layout = KVLayout(
            num_layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim, block_tokens=self.block_tokens,
            dtype=self.dtype, order=self.order,
        )  # fmt: skip
        transfer = TransferConfig(
            listen=self.transport, checksums=self.checksums, copy_threads=self.connections,
            connections=self.connections, lease_s=_PATIENCE_S, stall_s=_PATIENCE_S,
        )  # fmt: skip
        size = self.num_blocks * layout.block_bytes
        config = PoolConfig(transfer=transfer, max_hbm=size, page_bytes=1 << 16)
        return MemPool(layout, hbm=size, config=config)


class Peer:
    """The process, seen from the parent. A context manager; leaving it ends the process."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "poolweave.serving.bench.peer"]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def open(self, *specs: PoolSpec) -> list[tuple[str, str]]:
        """Instances and addresses of fresh pools, which replace those before. Raises what opening them did."""
        return [(name, address) for name, address in self._ask({"open": [asdict(spec) for spec in specs]})]

    def send_to(self, others: Sequence[tuple[str, str]]) -> None:
        """Each pool sends a block to each of these."""
        self._ask({"send": others})

    def usage(self) -> Usage:
        """What the process holds now."""
        return Usage(**self._ask({"usage": True}))

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # what a dead one did not read
            self._child.stdin.close()
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()

    def _ask(self, command: dict[str, Any]) -> Any:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(command) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            pass  # the empty answer says so too
        answer = self._child.stdout.readline()
        if not answer:
            raise PeerLost(f"the study's other process ended with code {self._child.wait()}", reason="lost")
        said = json.loads(answer)
        if "error" in said:
            raise PoolweaveError(f"at the study's other process: {said['error']}")
        return said["answer"]


def _obey(command: dict[str, Any], pools: list[MemPool], stack: ExitStack) -> Any:
    if "open" in command:
        stack.close()
        pools.clear()
        for spec in command["open"]:
            pool = stack.enter_context(PoolSpec(**spec).open())
            pool.view()[:] = 0  # resident, as in a pool that serves
            pools.append(pool)
        return [(pool.instance, pool.address) for pool in pools]
    if "usage" in command:
        return asdict(Usage.now())
    for pool in pools:
        blocks = pool.alloc(1)
        pool.seal(blocks)
        for instance, address in command["send"]:
            pool.connect(instance, address)
            pool.transfer(instance, blocks, tag=b"").result(_SEND_TIMEOUT_S)
        pool.free(blocks)
    return len(pools)


def _serve() -> None:
    pools: list[MemPool] = []
    with ExitStack() as stack:
        for line in sys.stdin:
            try:
                said: dict[str, Any] = {"answer": _obey(json.loads(line), pools, stack)}
            except PoolweaveError as error:
                said = {"error": f"{type(error).__name__}: {error}"}
            sys.stdout.write(json.dumps(said) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    _serve()
