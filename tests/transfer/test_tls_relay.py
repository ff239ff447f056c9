"""TLS relays: what goes in at one end comes out at the other, both ways at once, and an end shows at both."""

from __future__ import annotations

import functools
import hashlib
import random
import select
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme
from ref_waiting import until

from poolweave.transfer import tls_relay
from poolweave.transfer.tls_relay import TlsRelay

MANY = 6 << 20  # more than all buffers on the way hold


class Line:
    """Two relays joined by TCP; `ends` in the clear, `wires` as they lie between them."""

    def __init__(self, server: ssl.SSLContext, client: ssl.SSLContext) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            dialled = socket.create_connection(listener.getsockname())
            accepted, _ = listener.accept()
        wraps = (
            functools.partial(client.wrap_bio, server_hostname="127.0.0.1"),
            functools.partial(server.wrap_bio, server_side=True),
        )
        self.wires = dialled, accepted
        for wire in self.wires:
            wire.setblocking(False)
        self.relays = [TlsRelay(wire, wrap, lambda _: None) for wire, wrap in zip(self.wires, wraps, strict=True)]
        self.ends = [relay.end for relay in self.relays]
        for relay in self.relays:
            relay.end.settimeout(60)
            relay.thread.start()

    def close(self) -> None:
        for relay in self.relays:
            relay.cut()
            relay.end.close()
            relay.thread.join(60)
            assert not relay.thread.is_alive()


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    authority.configure_trust(client)
    made = Line(server, client)
    yield made
    made.close()


def read(sock: socket.socket, nbytes: int, seed: int) -> str:
    """The digest of so many bytes, taken in pieces of any size."""
    sizes, digest = random.Random(seed), hashlib.sha256()
    while nbytes:
        data = sock.recv(min(nbytes, sizes.randrange(1, 300_000)))
        assert data
        digest.update(data)
        nbytes -= len(data)
    return digest.hexdigest()


def write(sock: socket.socket, data: bytes, seed: int) -> None:
    sizes, sent = random.Random(seed), 0
    while sent < len(data):
        step = sizes.choice((1, 64, 16_384, 16_385, 400_000))
        sock.sendall(data[sent : sent + step])
        sent += step


def test_both_ways_at_once(line: Line) -> None:
    texts = [random.Random(seed).randbytes(MANY) for seed in range(2)]
    writers = [
        threading.Thread(target=write, args=(end, text, seed))
        for seed, (end, text) in enumerate(zip(line.ends, texts, strict=True))
    ]
    got: dict[int, str] = {}
    readers = [
        threading.Thread(target=lambda i=i: got.update({i: read(line.ends[1 - i], MANY, i)}))  # type: ignore[misc]
        for i in range(2)
    ]
    for thread in (*writers, *readers):
        thread.start()
    for thread in (*writers, *readers):
        thread.join(60)
    assert got == {i: hashlib.sha256(text).hexdigest() for i, text in enumerate(texts)}


def test_what_was_written_before_the_end_arrives(line: Line) -> None:
    text = random.Random(1).randbytes(MANY)
    writer = threading.Thread(target=lambda: (line.ends[0].sendall(text), line.ends[0].shutdown(socket.SHUT_WR)))
    writer.start()
    assert read(line.ends[1], MANY, 1) == hashlib.sha256(text).hexdigest()
    assert line.ends[1].recv(1) == b""
    writer.join(60)
    assert [end.failure for end in line.ends] == [None, None]


@pytest.mark.parametrize("cut", [0, 1])
def test_a_cut_ends_both(line: Line, cut: int) -> None:
    line.ends[0].sendall(b"hello")
    assert line.ends[1].recv(5) == b"hello"
    line.wires[cut].shutdown(socket.SHUT_RDWR)
    assert [end.recv(1) for end in line.ends] == [b"", b""]


def test_a_record_that_nobody_sealed_ends_it(line: Line) -> None:
    line.ends[0].sendall(b"hello")
    assert line.ends[1].recv(5) == b"hello"
    line.wires[0].send(b"\x17\x03\x03\x00\x20" + bytes(32))
    assert line.ends[1].recv(1) == b""
    assert line.ends[1].failure is not None


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Counter[int | None]:
    """How often each thread has waited in a relay."""
    counts: Counter[int | None] = Counter()

    class Poll:
        def __init__(self) -> None:
            self._poll = select.poll()
            self.register = self._poll.register

        def poll(self, *timeout: Any) -> list[tuple[int, int]]:
            counts[threading.current_thread().ident] += 1
            return self._poll.poll(*timeout)

    constants = {"POLLIN": select.POLLIN, "POLLOUT": select.POLLOUT}
    monkeypatch.setattr(tls_relay, "select", SimpleNamespace(poll=Poll, **constants))
    return counts


@pytest.mark.parametrize("dropped", [False, True])
def test_an_end_that_is_closed_while_the_peer_reads_nothing_is_waited_for_asleep(
    line: Line, waits: Counter[int | None], dropped: bool
) -> None:
    end, thread, sent = line.ends[0], line.relays[0].thread, 0
    end.setblocking(False)

    def stuck() -> bool:
        nonlocal sent
        before = sent
        try:
            while True:
                sent += end.send(bytes(100_000))
        except BlockingIOError:
            threading.Event().wait(0.1)
            return sent == before

    def asleep() -> bool:
        before = waits[thread.ident]
        threading.Event().wait(0.1)
        return waits[thread.ident] == before

    until(stuck, "nothing more goes")
    end.close()
    until(asleep, "it does not ask again and again")
    assert thread.is_alive()
    if dropped:
        line.relays[0].drop()
    else:
        read(line.ends[1], sent, 1)
    thread.join(60)
    assert not thread.is_alive()
