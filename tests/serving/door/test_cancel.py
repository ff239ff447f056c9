"""C33: a client that goes away ends its request wherever it is, and nothing of it is left."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import pytest
from ref_door import World
from ref_waiting import until


def connect(world: World, **fields: object) -> socket.socket:
    """A client that has sent its request and reads nothing yet."""
    body = json.dumps({"model": world.model, "prompt": "hello", "max_tokens": 500, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    parts = urlsplit(world.door.address)
    client = socket.create_connection((parts.hostname, parts.port))
    client.sendall(head.encode() + b"\r\n\r\n" + body)
    return client


def gone(world: World) -> float:
    """Requests whose client went away, as the metrics count them."""
    for line in world.client.get("/metrics").text.splitlines():
        if line.startswith("poolweave:requests_failed_total{") and 'status="499"' in line:
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def nothing_left(world: World) -> bool:
    running = [thread.instance.running for thread in world.instances.values()]
    return not any(running) and world.client.get("/deployment").json()["in_flight"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_during_prefill_it_is_cancelled_there_and_what_was_sent_is_dropped(world: World, stream: bool) -> None:
    before, told = gone(world), len(world.log("Cancel"))
    world.hold()
    client = connect(world, stream=stream)
    until(lambda: world.instances["prefill-0"].instance.running, "the prompt is being computed")
    client.close()
    until(lambda: len(world.log("Cancel")) == told + 1, "it is cancelled")
    request = world.log("Cancel")[-1]
    assert request in world.log("Prefill")
    until(lambda: request in world.log("Discard"), "the decode instance is told")
    until(lambda: nothing_left(world), "nothing runs")
    world.hold(open_=True)
    assert request not in world.log("Decode")
    assert gone(world) == before + 1


@pytest.mark.parametrize("stream", [False, True])
def test_during_decode_it_is_cancelled_there(world: World, stream: bool) -> None:
    before, told = gone(world), len(world.log("Cancel"))
    world.instances["decode-1"].instance.gate.clear()
    client = connect(world, stream=stream)
    until(lambda: world.instances["decode-1"].instance.running, "the answer is being computed")
    client.close()
    until(lambda: len(world.log("Cancel")) == told + 1, "it is cancelled")
    assert world.log("Cancel")[-1] in world.log("Decode")
    until(lambda: nothing_left(world), "nothing runs")
    world.hold(open_=True)
    assert gone(world) == before + 1


def test_a_stop_string_across_the_end_of_what_a_client_reads_cancels_nothing(world: World) -> None:
    """A request that ended is not cancelled afterwards."""
    told = len(world.log("Cancel"))
    assert world.post(prompt="x", max_tokens=3).status_code == 200
    until(lambda: nothing_left(world), "nothing runs")
    assert len(world.log("Cancel")) == told
