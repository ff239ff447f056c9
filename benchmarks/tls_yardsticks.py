"""TLS yardsticks: a certificate for the loopback, and what sealing alone costs."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import trustme

from poolweave.transfer import TlsFiles

RECORD = 16 << 10


def certificate(folder: Path) -> TlsFiles:
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    made.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    made.private_key_pem.write_to_path(folder / "key.pem")
    return TlsFiles(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")


def contexts(files: TlsFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=str(files.ca))
    server.load_cert_chain(files.cert, files.key)
    return server, client


def sealing(files: TlsFiles, nbytes: int) -> Callable[[], None]:
    """Greets in memory. -> what seals so many bytes there, and does nothing else"""
    server, client = contexts(files)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(back, there, server_hostname="127.0.0.1"), server.wrap_bio(there, back, server_side=True)
    greeted: set[ssl.SSLObject] = set()
    while len(greeted) < 2:
        for end in ends:
            try:
                end.do_handshake()
                greeted.add(end)
            except ssl.SSLWantReadError:
                pass
    data = memoryview(bytearray(RECORD))

    def run() -> None:
        for _ in range(nbytes // RECORD):
            ends[0].write(data)
            there.read()

    return run
