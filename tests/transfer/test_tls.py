"""TLS over tcp: both sides prove themselves, nothing is readable on the way, and refusals name what to change."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import trustme
from ref_transfer_world import Node, World, same_kv

from poolweave.errors import ConfigError, PoolweaveError, TransferFailed
from poolweave.transfer import TlsFiles

WAIT_S = 60
TAG = b"a tag that nobody else may read"


class Authority:
    """Makes certificates for the loopback."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ca = trustme.CA()
        self._ca.cert_pem.write_to_path(folder / "ca.pem")
        self._count = 0

    def files(self, *names: str, **times: Any) -> TlsFiles:
        self._count += 1
        made = self._ca.issue_cert(*(names or ("127.0.0.1",)), **times)
        cert, key = self._folder / f"{self._count}.pem", self._folder / f"{self._count}.key"
        made.cert_chain_pems[0].write_to_path(cert)
        made.private_key_pem.write_to_path(key)
        return TlsFiles(cert, key, self._folder / "ca.pem")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("strangers"))


class Tap:
    """A TCP proxy that writes down what passes."""

    def __init__(self, port: int) -> None:
        self.seen = bytearray()
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._socks: list[socket.socket] = []
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                one, _ = self._listener.accept()
            except OSError:
                return
            other = socket.create_connection(("127.0.0.1", self._target))
            self._socks += [one, other]
            for source, target in ((one, other), (other, one)):
                threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self.seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        self._listener.close()
        for sock in self._socks:
            sock.close()


@pytest.fixture
def tap() -> Iterator[Callable[[int], Tap]]:
    made: list[Tap] = []

    def make(port: int) -> Tap:
        made.append(Tap(port))
        return made[-1]

    yield make
    for one in made:
        one.close()


def pair(make_world: Callable[[str], World], here: TlsFiles | None, there: TlsFiles | None) -> tuple[Node, Node]:
    world = make_world("tcp")
    source, target = world.node(tls=here), world.node(tls=there)
    source.engine.connect(target.name, target.engine.address)
    return source, target


@pytest.mark.parametrize("encrypted", [False, True])
def test_blocks_arrive_and_nobody_reads_them(
    make_world: Callable[[str], World], ours: Authority, tap: Callable[[int], Tap], *, encrypted: bool
) -> None:
    tls = ours.files() if encrypted else None
    source, target = pair(make_world, tls, tls)
    control = tap(int(target.engine.address.rpartition(":")[2]))
    source.engine.connect(target.name, f"tcp://127.0.0.1:{control.port}")
    shipment = source.shipment(12, seed=3, tag=TAG)
    report = source.engine.offer(target.name, shipment).result(WAIT_S)
    assert report.pulled_blocks == 12
    with target.engine.receive(TAG, WAIT_S) as got:
        assert same_kv(source, shipment.blocks, target, got.blocks)
    assert (TAG in control.seen) != encrypted
    assert len(control.seen) > len(TAG)


def failure(make_world: Callable[[str], World], here: TlsFiles | None, there: TlsFiles | None) -> PoolweaveError:
    source, target = pair(make_world, here, there)
    with pytest.raises(PoolweaveError) as error:
        source.engine.offer(target.name, source.shipment(1, tag=TAG)).result(WAIT_S)
    assert target.engine.stats().receiving.sessions == 0
    return error.value


def test_another_authority_is_refused_on_either_side(
    make_world: Callable[[str], World], ours: Authority, strangers: Authority
) -> None:
    mine, theirs = ours.files(), strangers.files()
    error = failure(make_world, mine, theirs)
    assert isinstance(error, TransferFailed)
    assert (error.reason, "tls.ca here" in str(error)) == ("tls", True)
    lax = TlsFiles(theirs.cert, theirs.key, mine.ca)  # it accepts us, we do not accept it
    error = failure(make_world, lax, mine)
    assert isinstance(error, TransferFailed)
    assert "refuses our certificate" in str(error)


def test_a_certificate_that_is_over_or_anothers_is_refused(make_world: Callable[[str], World], ours: Authority) -> None:
    over = datetime.now(timezone.utc) - timedelta(days=1)
    old = ours.files(not_before=over - timedelta(days=1), not_after=over)
    assert "certificate has expired" in str(failure(make_world, ours.files(), old))
    assert "IP address mismatch" in str(failure(make_world, ours.files(), ours.files("other.example")))


def test_one_side_without_tls_is_told(make_world: Callable[[str], World], ours: Authority) -> None:
    error = failure(make_world, ours.files(), None)
    assert isinstance(error, TransferFailed)
    assert "set tls on all instances" in str(error)
    error = failure(make_world, None, ours.files())
    assert isinstance(error, TransferFailed)
    assert "does it expect TLS?" in str(error)


def test_files_that_are_not_right_are_refused_at_the_start(
    make_world: Callable[[str], World], ours: Authority, tmp_path: Path
) -> None:
    good, other = ours.files(), ours.files()
    for files, setting in (
        (TlsFiles(tmp_path / "none.pem", good.key, good.ca), "tls.cert"),
        (TlsFiles(good.cert, other.key, good.ca), "tls.cert"),
        (TlsFiles(good.cert, good.key, good.key), "tls.ca"),
    ):
        with pytest.raises(ConfigError) as error:
            make_world("tcp").node(tls=files)
        assert error.value.setting == setting
    with pytest.raises(ConfigError, match="NIXL"):
        make_world("nixl").node(tls=good)


def test_connections_leave_no_thread_behind(make_world: Callable[[str], World], ours: Authority) -> None:
    source, target = pair(make_world, ours.files(), ours.files())
    source.engine.offer(target.name, source.shipment(2, tag=TAG)).result(WAIT_S)
    target.engine.receive(TAG, WAIT_S).close()
    source.engine.close()
    target.engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "poolweave-tls"]
