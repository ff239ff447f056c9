"""The slot protocol with real threads: attention and FFN workers over one board, against one loop without them."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest
from ref_board import (
    BROKEN,
    DIM,
    GREEDY,
    HEADS,
    HIDDEN,
    LAYERS,
    LENGTH,
    READY,
    STOP,
    VOCAB,
    Model,
    make_board,
    running,
    seat_request,
    wait_for,
)

from poolweave.crosspool_engine._native import AttentionWorker, Board, FfnStack, FfnWorker, KvView
from poolweave.errors import ConfigError


@pytest.fixture(scope="module")
def models() -> list[Model]:
    return [Model(seed) for seed in range(3)]


def all_ranks(board: Board, models: list[Model], ranks: int, in_flight: int) -> list[Any]:
    """An attention worker and `ranks` FFN workers; layer n of each model lies on rank n % ranks."""
    board.set_in_flight(in_flight)
    attention = AttentionWorker(board)
    workers: list[Any] = [FfnWorker(board, rank) for rank in range(ranks)]
    for number, model in enumerate(models):
        board.set_model(number, 1.0, [[n % ranks] for n in range(LAYERS)])
        attention.activate(number, model.attention, model.kv)
        for rank, worker in enumerate(workers):
            stack = FfnStack(HIDDEN)
            own = [n for n in range(LAYERS) if n % ranks == rank]
            for n in own:
                stack.add_dense(model.layers[n])
            worker.activate(number, stack, [own.index(n) if n in own else -1 for n in range(LAYERS)])
            worker_stacks.append(stack)
    return [attention, *workers]


worker_stacks: list[FfnStack] = []  # kept while their workers run: workers borrow them


@pytest.mark.parametrize("in_flight", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_equal_a_plain_loop(models: list[Model], ranks: int, in_flight: int) -> None:
    board = make_board()
    workers = all_ranks(board, models, ranks, in_flight)
    prompts = [[5 + n, 7, 9 * n % VOCAB] for n in range(4)]
    for n in range(4):
        seat_request(board, n, prompts[n], 20, [8 * n + k for k in (3, 0, 5, 1, 2)])
        board.form(n, n % 3, [n])
        board.set_turn(n, READY)
    with running(board, *workers):
        wait_for(board, [0, 1, 2, 3])
    for n in range(4):
        assert board.finish(n) == LENGTH
        assert board.tokens(n).tolist() == models[n % 3].decode(prompts[n], 20)
    stages = 4 * 19 * (LAYERS + 1)
    assert workers[0].stages == stages
    assert sum(worker.stages for worker in workers[1:]) == 4 * 19 * LAYERS


def test_rows_of_a_batch_end_early_and_others_join(models: list[Model]) -> None:
    board = make_board()
    workers = all_ranks(board, models, 1, 2)
    want = [models[0].decode([11, n], end) for n, end in enumerate((6, 12, 30))]
    seat_request(board, 0, [11, 0], 6, [0, 1])
    seat_request(board, 1, [11, 1], 12, [2, 3, 4])
    board.form(0, 0, [0, 1])
    board.set_turn(0, READY)
    with running(board, *workers):
        wait_for(board, [0])
        assert (board.finish(0), board.finish(1)) == (LENGTH, 0)  # the shorter one ended the batch
        seat_request(board, 2, [11, 2], 30, [5, 6, 7, 8, 9, 10, 11, 12])
        board.form(0, 0, [2, 1])  # the other goes on where it was, beside a new one
        board.set_turn(0, READY)
        wait_for(board, [0])
        assert (board.finish(1), board.finish(2)) == (LENGTH, 0)
        board.form(0, 0, [2])
        board.set_turn(0, READY)
        wait_for(board, [0])
    assert [board.tokens(seat).tolist() for seat in (0, 1, 2)] == want
    stamps = board.stamps(2)
    assert (np.diff(stamps[2:]) > 0).all()
    assert stamps[1] == 0  # given, not drawn


def test_a_called_slot_comes_at_its_next_token(models: list[Model]) -> None:
    board = make_board()
    workers = all_ranks(board, models, 1, 2)
    seat_request(board, 0, [3], 60, list(range(15)))
    board.form(0, 1, [0])
    board.call(0)
    board.set_turn(0, READY)
    with running(board, *workers):
        wait_for(board, [0])
    assert (board.finish(0), board.position(0)) == (0, 1)


def test_stop_tokens_and_a_drawn_seed_repeat(models: list[Model]) -> None:
    board = make_board()
    workers = all_ranks(board, models, 1, 2)
    plain = models[2].decode([4, 4], 30)
    stop = plain[9]
    seat_request(board, 0, [4, 4], 30, list(range(8)), stops=[stop])
    seat_request(board, 1, [4, 4], 30, list(range(8, 16)), temperature=1.5, seed=77)
    seat_request(board, 2, [4, 4], 30, list(range(16, 24)), temperature=1.5, seed=77)
    for seat in range(3):
        board.form(seat, 2, [seat])
        board.set_turn(seat, READY)
    with running(board, *workers):
        wait_for(board, [0, 1, 2])
    assert board.finish(0) == STOP
    assert board.tokens(0).tolist() == plain[: plain.index(stop, 2) + 1]
    assert board.tokens(1).tolist() == board.tokens(2).tolist() != plain


def test_a_row_that_turns_to_nan_ends_alone(models: list[Model]) -> None:
    board = make_board()
    model = Model(0)
    workers = all_ranks(board, [model], 1, 2)
    model.memory[0] = np.nan  # an unwritten block of the first row
    board.set_seat(0, [1, 2, 3, 4, 5], 4, 20, [[0, 1, 2, 3, 4]], GREEDY)
    seat_request(board, 1, [1, 2], 10, [5, 6, 7])
    board.form(0, 0, [0, 1])
    board.set_turn(0, READY)
    with running(board, *workers):
        wait_for(board, [0])
        assert (board.finish(0), board.finish(1)) == (BROKEN, 0)
        assert board.position(0) == 4  # nothing was drawn from it
        board.form(0, 0, [1])
        board.set_turn(0, READY)
        wait_for(board, [0])
    assert board.tokens(1).tolist() == model.decode([1, 2], 10)


def test_hosted_stages_give_the_same_tokens(models: list[Model]) -> None:
    """Control lowering off: the host names each stage; same executors, same tokens."""
    board = make_board()
    attention, ffn = all_ranks(board, models, 1, 1)
    seat_request(board, 0, [8, 2], 15, [1, 3, 0, 2])
    board.form(0, 1, [0])
    while board.finish(0) == 0:
        for layer in range(LAYERS):
            board.set_layer(0, layer)
            attention.step(0)
            ffn.step(0)
        board.set_layer(0, LAYERS)
        attention.step(0)
    assert board.tokens(0).tolist() == models[1].decode([8, 2], 15)


def test_fairness_between_models_of_unlike_depth(models: list[Model]) -> None:
    """A model that costs three times as much gets a third of the passes while both have work."""
    board = make_board()
    workers = all_ranks(board, models, 1, 1)
    board.set_model(1, 3.0, [[0]] * LAYERS)
    for seat, model in ((0, 0), (1, 1)):
        seat_request(board, seat, [1], 60 if model == 0 else 64, [20 * seat + k for k in range(16)])
        board.form(seat, model, [seat])
        board.set_turn(seat, READY)
    with running(board, *workers):
        wait_for(board, [0, 1])
    shared = int((board.stamps(1)[1:] < board.stamps(0)[-1]).sum())  # passes of the dear one while both had work
    assert 18 <= shared <= 22


def test_idle_workers_cost_no_cpu(models: list[Model]) -> None:
    board = make_board()
    workers = all_ranks(board, models, 2, 2)
    with running(board, *workers):
        board.rest(board.bell(), 100)  # let them fall asleep
        before = time.process_time()
        board.rest(board.bell(), 1_000)
        used = time.process_time() - before
    assert used < 0.1  # three workers spinning would use a core


def test_misuse_is_refused(models: list[Model]) -> None:
    board = make_board()
    attention, ffn = AttentionWorker(board), FfnWorker(board, 0)
    with pytest.raises(ConfigError, match="model 0 is not active"):
        attention.step(0)
    with pytest.raises(ConfigError, match="layer 0 of model 0 is not on FFN rank 0"):
        ffn.step(0)
    with pytest.raises(ConfigError, match="no slot 4"):
        attention.step(4)
    with pytest.raises(ConfigError, match="model 3 of a board of 3"):
        attention.activate(3, models[0].attention, models[0].kv)
    with pytest.raises(ConfigError, match="blocks of 8 does not fit"):
        attention.activate(0, models[0].attention, KvView(np.zeros((1, LAYERS, 2, 8, HEADS, DIM), np.float32)))
    with pytest.raises(ConfigError, match="do not fit the board"):
        ffn.activate(0, models[0].ffn, [LAYERS])
    with pytest.raises(ConfigError, match="in_flight"):
        board.set_in_flight(0)
    with pytest.raises(ConfigError, match="FFN rank 8"):
        FfnWorker(board, 8)
    with pytest.raises(ConfigError, match="at most 16 rows"):
        Board.create({"slots": 1, "max_rows": 17, "seats": 1, "max_tokens": 1, "block_tokens": 1, "max_hidden": 1,
                      "models": 1, "events": 0, "width": 1})  # fmt: skip
    with pytest.raises(ConfigError, match="up to 65"):
        seat_request(board, 0, [1], 65, [0])
    with pytest.raises(ConfigError, match="17 blocks, the board has room for 16"):
        seat_request(board, 0, [1], 60, list(range(17)))
    with pytest.raises(ConfigError, match="no seat 12"):
        board.form(0, 0, [12])
    with pytest.raises(ConfigError, match="4 rows, the board has room for 3"):
        board.form(0, 0, [0, 1, 2, 3])


def test_another_mapping_sees_the_same_board() -> None:
    board = make_board()
    seat_request(board, 5, [1, 2, 3], 9, [4])
    other = Board.attach(board.fd)
    assert other.tokens(5).tolist() == [1]
    assert other.position(5) == 0
    fd = os.memfd_create("no-board")
    try:
        os.write(fd, bytes(100_000))
        with pytest.raises(ConfigError, match="no board"):
            Board.attach(fd)
    finally:
        os.close(fd)
