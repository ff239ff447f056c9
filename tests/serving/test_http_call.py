"""What a server says instead of figures is told in a line that says what to do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from poolweave.errors import ConfigError, PeerLost, PoolweaveError
from poolweave.serving.http_call import get_json


class Server(HTTPServer):
    """Answers the next request with `said`."""

    status, said = 200, b"{}"


class Answer(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.said)

    def log_message(self, *ignored: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Answer) as made:
        threading.Thread(target=made.handle_request, daemon=True).start()
        yield made


@pytest.mark.parametrize(
    ("status", "said", "told"),
    [
        (401, b'{"error": {"message": "no key"}}', "answered 401: no key; the key is --key or POOLWEAVE_API_KEY"),
        (503, b"<html>busy</html>", "answered 503: <html>busy</html>"),
        (500, b"", "answered 500: nothing"),
        (404, b'{"error": 3}', 'answered 404: {"error": 3}'),
        (200, b"<html>", "answered no JSON; is it a poolweave door?"),
        (200, b"[]", "answered no JSON object; is it a poolweave door?"),
    ],
)
def test_a_refusal_is_told_in_the_servers_own_words(server: Server, status: int, said: bytes, told: str) -> None:
    server.status, server.said = status, said
    url = f"http://127.0.0.1:{server.server_port}/deployment"
    with pytest.raises(PoolweaveError) as caught:
        get_json(url)
    assert str(caught.value) == f"{url} {told}"


def test_figures_are_given(server: Server) -> None:
    server.said = b'{"a": 1}'
    assert get_json(f"http://127.0.0.1:{server.server_port}/") == {"a": 1}


def test_nobody_is_told_apart_from_nonsense() -> None:
    with pytest.raises(PeerLost, match=r"^http://127.0.0.1:1/x does not answer: Connection refused$"):
        get_json("http://127.0.0.1:1/x")
    with pytest.raises(ConfigError, match="'nonsense' is no URL: it begins with http:// or https://"):
        get_json("nonsense")
