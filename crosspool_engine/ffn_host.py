"""A weights rank on another host: waits for an engine, serves it as an FFN worker over TCP, then waits for the next.

    python -m poolweave.crosspool_engine.ffn_host --listen 127.0.0.1:7777

Whoever can connect can have it read any model directory of its user: listen on a network of your own. Each engine's
session has two connections, one for orders and one for hidden states, and ends with either; all it loaded goes with it.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

from poolweave.crosspool_engine._native import Board, HiddenLink
from poolweave.crosspool_engine.remote_messages import Hello, parse_address, receive_hello
from poolweave.crosspool_engine.worker import take_orders
from poolweave.crosspool_engine.worker_messages import Done, WorkerSpec, send

_log = logging.getLogger(__name__)
_SECOND_S = 30.0  # how long an engine has to open its second connection


def serve(board: Board, orders: Connection, data: socket.socket, hello: Hello) -> None:
    """One session: until either connection ends. The native worker runs in the calling thread."""
    from poolweave.crosspool_engine.models.halves import FfnHalf

    spec = WorkerSpec(
        rank=hello.rank, board_fd=board.fd, channel_fd=-1, arena_fds=None, block_tokens=hello.sizes["block_tokens"],
        kernels=hello.kernels,
    )  # fmt: skip
    half = FfnHalf(board, spec)
    link = HiddenLink(board, data.detach(), hello.rank, True)

    def receive() -> None:
        link.receive()
        board.abort()

    def obey() -> None:
        take_orders(half, orders)
        link.shut()
        board.abort()

    send(orders, Done())  # up, and ready for orders
    threads = [threading.Thread(target=target, daemon=True) for target in (link.send, receive, obey)]
    for thread in threads:
        thread.start()
    half.run()
    link.shut()
    orders.close()


def _session(orders_fd: int, data_fd: int) -> None:
    """In a process of its own, so that nothing of a session stays."""
    orders = Connection(orders_fd)
    hello = receive_hello(orders)
    serve(Board.create({**hello.sizes}), orders, socket.socket(fileno=data_fd), hello)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", default="127.0.0.1:0", help="host:port; port 0 takes a free one and prints it")
    parser.add_argument("--session", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.session is not None:
        _session(*options.session)
        return 0
    with socket.create_server(parse_address(options.listen)) as listener:
        host, port = listener.getsockname()[:2]
        sys.stdout.write(f"{host}:{port}\n")
        sys.stdout.flush()
        while True:
            _accept(listener)


def _accept(listener: socket.socket) -> None:
    """Take an engine's two connections and serve it until it is gone."""
    listener.settimeout(None)
    orders, peer = listener.accept()
    with orders:
        listener.settimeout(_SECOND_S)
        try:
            data, other = listener.accept()
        except TimeoutError:
            _log.warning("%s opened no second connection", peer)
            return
        with data:
            if other[0] != peer[0]:
                _log.warning("connections came from %s and %s, of two engines: both are closed", peer, other)
                return
            _log.info("serving %s", peer)
            fds = (orders.fileno(), data.fileno())
            command = [sys.executable, "-m", "poolweave.crosspool_engine.ffn_host", "--session", *map(str, fds)]
            child = subprocess.Popen(command, pass_fds=fds, env={**os.environ, "OMP_NUM_THREADS": "1"})
    child.wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    sys.exit(main(sys.argv[1:]))
