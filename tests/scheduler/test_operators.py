from __future__ import annotations

import numpy as np
import pytest
from ref_device import DEPTH, GEMMS, LAYERS, SMS, TILE, Device

from poolweave.errors import ConfigError
from poolweave.scheduler.cost_model import ArchitectureModel, DecodeStep, PrefillSample
from poolweave.scheduler.fitting import ErrorReport
from poolweave.scheduler.operators import (
    AttentionOperator,
    CollectiveOperator,
    ExchangeSample,
    HopOperator,
    LinearOperator,
    Operator,
    OperatorModel,
    OperatorSample,
    Parallelism,
    WaveOperator,
)

LENGTHS = [
    (x, round(x * y) // 16 * 16) for x in (512, 1024, 2048, 4096, 8192, 12288) for y in (0, 0.25, 0.5, 0.75, 0.9)
]
HELD_OUT = [(x, round(x * y) // 16 * 16) for x in (768, 1536, 3072, 6144, 10240) for y in (0.1, 0.4, 0.6, 0.85)]


def measured_operators(device: Device) -> tuple[Operator, ...]:
    """Fits of all operators from samples at TP 1."""
    lengths = [*range(128, 2049, 128), *range(2304, 12289, 512)]

    def samples(time_s: object) -> list[OperatorSample]:
        return [OperatorSample(new_tokens=n, prompt_tokens=n, seconds=time_s(n)) for n in lengths]  # type: ignore[operator]

    gemms = [
        WaveOperator.fit(
            samples(lambda n, name=name: device.gemm_s(name, n)),
            count=LAYERS,
            tile_tokens=TILE,
            column_blocks=columns // TILE,
            num_sms=SMS,
        )
        for name, columns in GEMMS.items()
    ]
    attention = AttentionOperator.fit(
        [OperatorSample(new_tokens=x - c, prompt_tokens=x, seconds=device.attention_s(x - c, x)) for x, c in LENGTHS],
        count=LAYERS,
    )
    norms = LinearOperator.fit(samples(device.norm_s), count=2 * LAYERS)
    reduce = CollectiveOperator(count=2 * LAYERS, bytes_per_token=5120 * 2, bytes_per_s=180e9, latency_s=15e-6)
    return (*gemms, attention, norms, reduce)


def error(predict: object, device: Device, tp: int) -> ErrorReport:
    predicted = [predict(x, c) for x, c in HELD_OUT]  # type: ignore[operator]
    return ErrorReport.of(predicted, [device.prefill_s(x - c, x, tp) for x, c in HELD_OUT])


def test_operator_level_survives_a_change_of_parallelism() -> None:
    device = Device()
    model = OperatorModel(operators=measured_operators(device))
    whole = ArchitectureModel.fit(
        [PrefillSample(prompt_tokens=x, cached_tokens=c, seconds=device.prefill_s(x - c, x)) for x, c in LENGTHS]
    )
    assert error(model.compile().prefill_s, device, tp=1).mean < 0.06
    for tp in (2, 4):
        operators = error(model.with_parallelism(Parallelism(tp=tp)).compile().prefill_s, device, tp)
        architecture = error(whole.scaled(1 / tp).prefill_s, device, tp)
        assert operators.mean <= architecture.mean / 2, (tp, operators, architecture)
        assert operators.mean < 0.12


def test_table_agrees_with_the_sum_of_operators() -> None:
    hop = HopOperator(bytes_per_token=5120 * 2, bytes_per_s=25e9, latency_s=1e-5)
    model = OperatorModel(operators=(*measured_operators(Device()), hop), parallelism=Parallelism(tp=2, pp=2))
    compiled = model.compile()
    assert compiled.stages == 2
    for x, cached in [*LENGTHS, *HELD_OUT]:
        assert compiled.prefill_s(x, cached) == pytest.approx(model.exact_s(x, cached))
    for x in (1000, 4099):  # off the grid: rounded up, never less than the operators say
        assert compiled.prefill_s(x, 7) >= model.exact_s(x, 7) - 1e-12


def test_candidates_in_one_call() -> None:
    compiled = OperatorModel(operators=measured_operators(Device())).compile()
    cached = np.array([0, 16, 2048, 4096, 0], np.int32)
    together = compiled.prefill_s(4096, cached)
    assert together.tolist() == pytest.approx([compiled.prefill_s(4096, int(c)) for c in cached])
    assert together[0] > together[1] > together[2] > together[3] >= 0


def test_waves() -> None:
    gemm = WaveOperator(count=1, tile_tokens=128, column_blocks=40, num_sms=100, full_wave_s=2.0, last_wave_s=1.5)
    new = np.array([0.0, 1, 128, 256, 384, 640, 641])
    assert gemm.waves(new, Parallelism()).tolist() == [0, 1, 1, 1, 2, 2, 3]
    assert gemm.seconds(new, new, Parallelism()).tolist() == [0, 1.5, 1.5, 1.5, 3.5, 3.5, 5.5]
    assert gemm.waves(new, Parallelism(tp=2)).tolist() == [0, 1, 1, 1, 1, 1, 2]


def test_fit_finds_the_constants_it_was_made_of() -> None:
    gemm = WaveOperator(count=3, tile_tokens=64, column_blocks=7, num_sms=10, full_wave_s=2e-3, last_wave_s=1e-3)
    attention = AttentionOperator(count=3, a=-3e-9, b=4e-9, c=1e-7, d=1e-5)
    linear = LinearOperator(count=3, constant_s=1e-5, per_token_s=2e-8)
    one = Parallelism()

    def samples(operator: Operator) -> list[OperatorSample]:
        made = []
        for prompt in (64, 320, 1000, 4000):
            for cached in (0, prompt // 3, prompt // 2):
                new = np.array([float(prompt - cached)])
                seconds = float(operator.seconds(new, np.array([float(prompt)]), one)[0])
                made.append(OperatorSample(new_tokens=prompt - cached, prompt_tokens=prompt, seconds=seconds))
        return made

    fitted = WaveOperator.fit(samples(gemm), count=3, tile_tokens=64, column_blocks=7, num_sms=10)
    assert (fitted.full_wave_s, fitted.last_wave_s) == pytest.approx((2e-3, 1e-3))
    again = AttentionOperator.fit(samples(attention), count=3)
    assert (again.a, again.b, again.c, again.d) == pytest.approx((-3e-9, 4e-9, 1e-7, 1e-5))
    line = LinearOperator.fit(samples(linear), count=3)
    assert (line.constant_s, line.per_token_s) == pytest.approx((1e-5, 2e-8))


def test_parallelism_multiplies_constants() -> None:
    new, one, four = np.array([1000.0]), Parallelism(), Parallelism(tp=4)
    attention = AttentionOperator(count=1, a=0.0, b=1e-8, c=0.0, d=1e-5)
    assert attention.seconds(new, new, four)[0] == pytest.approx(1e-2 / 4 + 1e-5)
    norm = LinearOperator(count=1, constant_s=1e-6, per_token_s=1e-9)
    assert norm.seconds(new, new, four)[0] == norm.seconds(new, new, one)[0]
    activation = LinearOperator(count=1, constant_s=1e-6, per_token_s=1e-9, sharded=True)
    assert activation.seconds(new, new, four)[0] == pytest.approx(1e-6 + 1e-6 / 4)
    reduce = CollectiveOperator(count=1, bytes_per_token=100, bytes_per_s=1e6, latency_s=1e-5)
    assert reduce.seconds(new, new, one)[0] == 0
    assert reduce.seconds(new, new, four)[0] == pytest.approx(1e-5 + 2 * 0.75 * 100 * 1000 / 1e6)
    hop = HopOperator(bytes_per_token=100, bytes_per_s=1e6, latency_s=1e-5)
    assert hop.seconds(new, new, four)[0] == 0
    assert hop.seconds(new, new, Parallelism(pp=3))[0] == pytest.approx(2 * (1e-5 + 100 * 1000 / 1e6))
    assert hop.seconds(np.array([0.0]), new, Parallelism(pp=3))[0] == 0


def test_what_ranks_send_each_other_is_found_from_exchanges_of_several_sizes() -> None:
    def taken(share: float) -> list[ExchangeSample]:
        return [ExchangeSample(nbytes=n, seconds=2e-5 + share * n / 1e9) for n in (100, 10_000, 10**6)]

    reduce = CollectiveOperator.fit(taken(2 * 3 / 4), ranks=4, count=60, bytes_per_token=2304)
    assert (reduce.bytes_per_s, reduce.latency_s) == pytest.approx((1e9, 2e-5))
    hop = HopOperator.fit(taken(1.0), bytes_per_token=2304)
    assert (hop.bytes_per_s, hop.latency_s) == pytest.approx((1e9, 2e-5))
    with pytest.raises(ConfigError, match="sends of more bytes took no longer"):
        HopOperator.fit([ExchangeSample(nbytes=n, seconds=1e-3) for n in (1, 1000)], bytes_per_token=1)


def test_reference_device_is_not_the_model() -> None:
    """The ground truth has what the model has not: were they the same, the comparison above would say nothing."""
    device = Device(noise=0.0)
    assert device.gemm_s("down", 4096, tp=2) != pytest.approx(device.gemm_s("down", 4096) / 2, rel=0.01)
    assert set(DEPTH) == set(GEMMS)


def test_refusals() -> None:
    for tp, pp in ((0, 1), (1, 0)):
        with pytest.raises(ConfigError, match="at least 1"):
            Parallelism(tp=tp, pp=pp)
    with pytest.raises(ConfigError, match="max_tokens"):
        OperatorModel(operators=(), max_tokens=8)
    small = OperatorModel(operators=(), max_tokens=1024, decode=DecodeStep(constant_s=1.0)).compile()
    with pytest.raises(ConfigError, match="built for 1024 tokens, the prompt has 1025"):
        small.prefill_s(1025, 1000)
    assert small.decode_step_s(3, 5) == 1.0
    with pytest.raises(ConfigError, match="no decode part"):
        OperatorModel(operators=()).compile().decode_step_s(1, 1)
