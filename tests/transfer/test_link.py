"""Links: who waits for an answer reads it itself, and holds up neither the loop, nor what is sent, nor an end."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from ref_waiting import until

from poolweave.errors import PoolweaveError
from poolweave.transfer.link import Link
from poolweave.transfer.loop import Loop


@dataclass(slots=True)
class Side:
    """One end: what came, on which thread; why it ended."""

    link: Link
    came: list[tuple[bytes, int]] = field(default_factory=list)
    lost: list[PoolweaveError] = field(default_factory=list)


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop("links", lambda now: math.inf, spin_s=1e-4)
    loop.start()
    yield loop
    loop.stop()
    loop.close()


def side_of(loop: Loop, sock: socket.socket) -> Side:
    sock.setblocking(False)
    side = Side(Link(loop, sock, None, lambda *_: None, lambda *_: None))
    side.link.hand_over(
        lambda link, payload, fds: side.came.append((payload, threading.get_ident())),
        lambda link, error: side.lost.append(error),
    )
    side.link.rekey(None, None)
    side.link.start()
    return side


@pytest.fixture
def sides(loop: Loop) -> Iterator[tuple[Side, Side]]:
    ours, theirs = (side_of(loop, sock) for sock in socket.socketpair())
    yield ours, theirs
    for side in (ours, theirs):
        loop.call_soon(side.link.close)
    until(lambda: ours.link.sock.fileno() < 0 and theirs.link.sock.fileno() < 0)


def going() -> bool:
    """Whether what is waited for is over: not yet."""
    return False


@contextmanager
def held(loop: Loop) -> Iterator[None]:
    """The loop's thread sees nothing meanwhile."""
    begun, go_on = threading.Event(), threading.Event()
    loop.call_soon(lambda: (begun.set(), go_on.wait(60))[0])
    assert begun.wait(60)
    yield
    go_on.set()


def assisting(side: Side, sleep_s: float) -> tuple[threading.Thread, list[bool]]:
    """A thread that waits at that side, asleep by now."""
    said: list[bool] = []
    thread = threading.Thread(target=lambda: said.append(side.link.assist(0.0, sleep_s, going)))
    thread.start()
    until(lambda: side.link._assisted)
    return thread, said


def test_who_waits_reads_the_answer_itself(sides: tuple[Side, Side]) -> None:
    ours, theirs = sides
    thread, said = assisting(ours, 60)
    theirs.link.send(b"answer")
    thread.join(30)
    assert said == [True]
    assert ours.came == [(b"answer", thread.ident)]


def test_what_came_before_is_handled_at_once(loop: Loop, sides: tuple[Side, Side]) -> None:
    ours, theirs = sides
    with held(loop):
        theirs.link.send(b"answer")
        assert ours.link.assist(0.0, 60, going)
        assert ours.came == [(b"answer", threading.get_ident())]
    theirs.link.send(b"more")
    until(lambda: len(ours.came) == 2)
    assert ours.lost == []


def test_who_waits_for_what_is_over_reads_nothing(loop: Loop, sides: tuple[Side, Side]) -> None:
    ours, theirs = sides
    with held(loop):
        theirs.link.send(b"another's")
        assert not ours.link.assist(0.0, 60, lambda: True)
        assert ours.came == []
    until(lambda: len(ours.came) == 1)


def test_nothing_comes_and_the_loop_reads_on(sides: tuple[Side, Side]) -> None:
    ours, theirs = sides
    assert not ours.link.assist(1e-5, 1e-5, going)
    theirs.link.send(b"later")
    until(lambda: [payload for payload, _ in ours.came] == [b"later"])
    assert ours.came[0][1] != threading.get_ident()


def test_what_waits_to_be_sent_goes_out_while_one_waits_for_an_answer(sides: tuple[Side, Side]) -> None:
    ours, theirs = sides
    thread, said = assisting(ours, 60)
    big = bytes(8 << 20)  # more than the socket takes at once
    ours.link.send(big)
    until(lambda: [payload for payload, _ in theirs.came] == [big])
    theirs.link.send(b"answer")
    thread.join(30)
    assert said == [True]


def test_closing_wakes_who_waits(loop: Loop, sides: tuple[Side, Side]) -> None:
    ours, _ = sides
    thread, _ = assisting(ours, 60)
    loop.call_soon(ours.link.close)
    thread.join(30)
    assert not thread.is_alive()
    assert ours.lost == []


def test_a_loss_is_told_once_by_the_loop(loop: Loop, sides: tuple[Side, Side]) -> None:
    ours, theirs = sides
    thread, said = assisting(ours, 60)
    loop.call_soon(theirs.link.close)
    thread.join(30)
    until(lambda: len(ours.lost) == 1)
    assert said == [False]
    assert not ours.link.assist(0.0, 60, going)
