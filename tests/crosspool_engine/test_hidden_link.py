"""Hidden states over TCP, with real sockets: the same tokens as in one process, and ends that are noticed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from ref_board import LAYERS, LENGTH, READY, Model, make_board, running, seat_request, wait_for

from poolweave.crosspool_engine._native import AttentionWorker, Board, FfnStack, FfnWorker, HiddenLink
from poolweave.errors import ConfigError, PoolweaveError


@pytest.fixture(scope="module")
def models() -> list[Model]:
    return [Model(seed) for seed in range(3)]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


@contextmanager
def linked(near: Board, far: Board, rank: int) -> Iterator[HiddenLink]:
    """The near end, with all four threads running."""
    ours, theirs = tcp_pair()
    ends = HiddenLink(near, ours.detach(), rank, False), HiddenLink(far, theirs.detach(), rank, True)
    threads = [threading.Thread(target=target) for end in ends for target in (end.send, end.receive)]
    for thread in threads:
        thread.start()
    try:
        yield ends[0]
    finally:
        ends[0].shut()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads), "an end did not notice that the other was shut"


def stack_of(model: Model, half: int | None = None) -> FfnStack:
    """All its layers, or the first or second half of each one's width: the two add up to the whole."""
    stack = FfnStack(32)
    for layer in model.layers:
        width = len(layer["gate"]) // 2
        part = slice(None) if half is None else slice(half * width, (half + 1) * width)
        stack.add_dense(
            {"gate": layer["gate"][part].copy(), "up": layer["up"][part].copy(), "down": layer["down"][:, part].copy()}
        )
    return stack


def seat_four(board: Board) -> list[list[int]]:
    prompts = [[5 + n, 7, 9 * n % 61] for n in range(4)]
    for n in range(4):
        seat_request(board, n, prompts[n], 20, [8 * n + k for k in (3, 0, 5, 1, 2)])
        board.form(n, n % 3, [n])
    return prompts


def check(board: Board, models: list[Model], prompts: list[list[int]]) -> None:
    for n in range(4):
        assert board.finish(n) == LENGTH
        assert board.tokens(n).tolist() == models[n % 3].decode(prompts[n], 20)


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_a_rank_on_another_host_decodes_the_same_tokens(models: list[Model], in_flight: int) -> None:
    near, far = make_board(), make_board()
    near.set_in_flight(in_flight)
    attention, ffn = AttentionWorker(near), FfnWorker(far, 0)
    stacks = [stack_of(model) for model in models]
    for number, model in enumerate(models):
        near.set_model(number, 1.0, [[0]] * LAYERS)
        attention.activate(number, model.attention, model.kv)
        ffn.activate(number, stacks[number], list(range(LAYERS)))
    prompts = seat_four(near)
    with running(far, ffn), running(near, attention), linked(near, far, 0):
        for n in range(4):
            near.set_turn(n, READY)
        wait_for(near, [0, 1, 2, 3])
    check(near, models, prompts)


def test_a_layer_over_a_rank_here_and_one_elsewhere_adds_up(models: list[Model]) -> None:
    near, far = make_board(), make_board()
    attention, here, there = AttentionWorker(near), FfnWorker(near, 0), FfnWorker(far, 1)
    halves = [(stack_of(model, 0), stack_of(model, 1)) for model in models]
    for number, model in enumerate(models):
        near.set_model(number, 1.0, [[0, 1]] * LAYERS)
        attention.activate(number, model.attention, model.kv)
        here.activate(number, halves[number][0], list(range(LAYERS)))
        there.activate(number, halves[number][1], list(range(LAYERS)))
    prompts = seat_four(near)
    with running(far, there), running(near, attention, here), linked(near, far, 1):
        for n in range(4):
            near.set_turn(n, READY)
        wait_for(near, [0, 1, 2, 3])
    check(near, models, prompts)


def test_stages_that_the_host_names_cross_too(models: list[Model]) -> None:
    near, far = make_board(), make_board()
    attention, ffn = AttentionWorker(near), FfnWorker(far, 0)
    stack = stack_of(models[1])
    near.set_model(1, 1.0, [[0]] * LAYERS)
    attention.activate(1, models[1].attention, models[1].kv)
    ffn.activate(1, stack, list(range(LAYERS)))
    seat_request(near, 0, [8, 2], 15, [1, 3, 0, 2])
    near.form(0, 1, [0])
    with running(far, ffn), linked(near, far, 0) as link:
        while near.finish(0) == 0:
            for layer in range(LAYERS):
                near.set_layer(0, layer)
                attention.step(0)
                link.step(0)
            near.set_layer(0, LAYERS)
            attention.step(0)
    assert near.tokens(0).tolist() == models[1].decode([8, 2], 15)


def test_a_step_ends_with_the_connection(models: list[Model]) -> None:
    near = make_board()
    near.set_model(0, 1.0, [[0]] * LAYERS)
    near.form(0, 0, [0])
    ours, theirs = tcp_pair()
    link = HiddenLink(near, ours.detach(), 0, False)
    receiver = threading.Thread(target=link.receive)
    receiver.start()
    theirs.close()
    with pytest.raises(PoolweaveError, match="the connection to FFN rank 0 has ended"):
        link.step(0)
    receiver.join(30)
    assert not receiver.is_alive()


@pytest.mark.parametrize("frame", [b"x" * 32, bytes(32)], ids=["noise", "zeros"])
def test_what_is_no_frame_ends_the_link(frame: bytes) -> None:
    far = make_board()
    ours, theirs = tcp_pair()
    link = HiddenLink(far, theirs.detach(), 0, True)
    with ours:
        ours.sendall(frame)
        with pytest.raises(ConfigError, match="does not fit this board"):
            link.receive()
        assert ours.recv(1) == b""
