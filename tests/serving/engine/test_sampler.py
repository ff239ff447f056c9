"""Drawing tokens: greedy, temperature, top-p, seeds, and rows that hold no number."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from poolweave.errors import RequestRefused
from poolweave.serving.engine import SamplingParams, Sequence
from poolweave.serving.engine.sampler import sample, uniform

pytestmark = pytest.mark.engine

PROBABILITIES = [0.05, 0.5, 0.3, 0.15]
LOGITS = torch.tensor([math.log(p) for p in PROBABILITIES])


def draws(num: int, **params: object) -> Counter[int | None]:
    sequences = [Sequence(str(seed), [0], SamplingParams(seed=seed, **params)) for seed in range(num)]
    return Counter(sample(LOGITS.expand(num, -1), sequences))


def test_greedy_takes_the_largest_and_needs_no_seed() -> None:
    assert draws(5) == {1: 5}


def test_temperature_one_draws_by_probability() -> None:
    counts = draws(4000, temperature=1.0)
    for token, probability in enumerate(PROBABILITIES):
        sigma = math.sqrt(4000 * probability * (1 - probability))
        assert abs(counts[token] - 4000 * probability) < 5 * sigma


def test_low_temperature_sharpens_and_the_lowest_is_greedy() -> None:
    assert draws(500, temperature=0.3)[1] > draws(500, temperature=1.0)[1]
    assert draws(50, temperature=1e-40) == {1: 50}


@pytest.mark.parametrize(("top_p", "kept"), [(0.49, {1}), (0.51, {1, 2}), (0.8, {1, 2}), (0.9, {1, 2, 3}), (1e-9, {1})])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    assert set(draws(400, temperature=1.0, top_p=top_p)) == kept


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    def drawn(seed: int, position: int, neighbours: int) -> int | None:
        sequences = [Sequence("n", [0] * 7, SamplingParams(seed=99, temperature=1.0))] * neighbours
        sequences.append(Sequence("r", [0] * position, SamplingParams(seed=seed, temperature=1.0)))
        return sample(LOGITS.expand(neighbours + 1, -1), sequences)[-1]

    assert drawn(3, 10, 0) == drawn(3, 10, 4)
    assert len({drawn(3, position, 0) for position in range(1, 40)}) > 1
    assert len({drawn(seed, 10, 0) for seed in range(40)}) > 1


def test_uniform_numbers_differ_between_neighbouring_seeds_and_positions() -> None:
    numbers = {uniform(seed, position) for seed in (0, 1, 2**64 - 1) for position in range(100)}
    assert len(numbers) == 300
    assert all(0 <= number < 1 for number in numbers)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_without_usable_numbers_give_none_and_spare_the_others(temperature: float, bad: float) -> None:
    rows = LOGITS.expand(3, -1).clone()
    rows[1, 2] = bad
    sequences = [Sequence(str(i), [0], SamplingParams(temperature=temperature, top_p=0.4, seed=i)) for i in range(3)]
    assert sample(rows, sequences) == [1, None, 1]


def test_forbidden_tokens_are_never_drawn() -> None:
    rows = LOGITS.clone()
    rows[1] = float("-inf")
    sequences = [Sequence(str(i), [0], SamplingParams(temperature=2.0, seed=i)) for i in range(300)]
    assert 1 not in sample(rows.expand(300, -1), sequences)


@pytest.mark.parametrize(
    "params",
    [
        {"max_new_tokens": 0}, {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")},
        {"top_p": 0.0}, {"top_p": 1.1}, {"stop": ("",)}, {"seed": -1}, {"seed": 2**64},
    ],
)  # fmt: skip
def test_impossible_parameters_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(RequestRefused):
        SamplingParams(**params)
