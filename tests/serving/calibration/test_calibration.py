"""Calibrations as files, and fits from made-up measurements of which the truth is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from poolweave.config import toml_text
from poolweave.errors import ConfigError
from poolweave.scheduler.cost_model import (
    ArchitectureModel,
    DecodeStep,
    KVLink,
    Link,
    PrefillSample,
    StepSample,
    TransferSample,
)
from poolweave.scheduler.operators import Parallelism
from poolweave.serving.calibration import CalibrateConfig, load_calibration
from poolweave.serving.deployment import load_deployment
from poolweave.serving.door.config import RoutingConfig
from poolweave.serving.simulator.question import Question

_BUILT_IN_FILE = "src/poolweave/serving/calibration/smollm2-cpu.toml"


def test_the_built_in_one_is_complete_and_plausible() -> None:
    found = load_calibration("smollm2-cpu")
    assert (found.model, found.kv_bytes_per_token, found.block_tokens) == ("smollm2", 46_080, 16)
    assert set(found.links) == {"shm", "tcp"}
    assert found.link == found.links["shm"]
    assert found.cost.prefill_s(512, 0) > found.cost.prefill_s(512, 256) > found.cost.prefill_s(512, 496) > 0
    assert found.cost.decode_step_s(8, 2000) > found.cost.decode_step_s(1, 100) > 0
    whole, third = (found.operators.model(Parallelism(tp=tp)).exact_s(256, 0) for tp in (1, 3))
    assert whole / 3 < third < whole
    two = found.operators.model(Parallelism(tp=2)).exact_s(256, 0)
    assert two > found.operators.computed().model(Parallelism(tp=2)).exact_s(256, 0), "ranks send each other something"
    assert found.operators.hops["stage"].bytes_per_token == 4 * 576
    tp = max(int(name.rpartition("tp")[2]) for name in found.errors if "tp" in name)
    operators, architecture = (found.errors[f"{level}_tp{tp}"].mean for level in ("operators", "architecture"))
    assert operators <= architecture / 2, "the operator level is worth its measurements after a change of parallelism"


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = load_calibration("smollm2-cpu")
    path = tmp_path / "deep" / "own.toml"
    found.save(path)
    assert load_calibration(path) == found
    path.write_text(path.read_text().replace("kv_bytes_per_token", "kv_bytes_a_token"))
    with pytest.raises(ConfigError, match="did you mean 'kv_bytes_per_token'"):
        load_calibration(path)
    with pytest.raises(ConfigError, match="cannot write /proc/nowhere/x"):
        found.save(Path("/proc/nowhere/x.toml"))
    with pytest.raises(ConfigError, match=r"needs at least one of \[links.shm\]"):
        replace(found, links={})


def test_toml_text() -> None:
    tomllib = pytest.importorskip("tomllib")
    nested: dict[str, Any] = {
        "one": 1, "text": 'a "b"', "small": 1e-09, "yes": True, "none": None, "list": [1, 2], "empty": {},
        "a": {"b": {"c": 1.5}}, "x": {"y.z": {"w": "é"}},
    }  # fmt: skip
    read = tomllib.loads(toml_text(nested))
    assert read == {key: value for key, value in nested.items() if key != "none"}


def test_a_link_is_found_from_transfers_that_vary_bytes_and_pieces() -> None:
    link = Link(bytes_per_s=2e9, latency_s=1e-4, per_call_s=3e-6)
    samples = [
        TransferSample(nbytes=n, calls=calls, seconds=link.seconds(n, calls))
        for n in (10**5, 10**6, 10**7)
        for calls in (1, 16, 64)
    ]
    fitted = Link.fit(samples)
    assert (fitted.bytes_per_s, fitted.latency_s, fitted.per_call_s) == pytest.approx((2e9, 1e-4, 3e-6))
    quicker = [replace(sample, seconds=sample.seconds - 2.5e-6 * sample.calls) for sample in samples[:3]]
    assert Link.fit([*quicker, *samples[3:]]).per_call_s >= 0
    with pytest.raises(ConfigError, match="transfers of more bytes took no longer"):
        Link.fit([replace(sample, seconds=1.0 / sample.nbytes) for sample in samples])


def test_noise_makes_no_time_negative() -> None:
    noisy = [1.0, 0.9, 1.1, 0.8, 1.2, 0.7]
    steps = [StepSample(num_sequences=n, kv_tokens=n * k, seconds=noisy[n - 1]) for n in range(1, 7) for k in (10, 90)]
    step = DecodeStep.fit(steps)
    assert min(step.constant_s, step.per_sequence_s, step.per_kv_token_s) >= 0
    prompts = [
        PrefillSample(prompt_tokens=100 * n, cached_tokens=16 * c, seconds=noisy[n - 1])
        for n in range(1, 7)
        for c in (0, 2, 3)
    ]
    model = ArchitectureModel.fit(prompts)
    assert all(model.prefill_s(8000, cached) <= model.prefill_s(8192, cached) for cached in (0, 4096, 8000 - 16))


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_tokens": (64,)}, {"cached_ratios": (0.0, 1.0)}, {"sequences": (0, 1)}, {"repeats": 0}, {"tp": -1},
        {"hold_out": 1.0}, {"transports": ("carrier pigeon",)}, {"transports": ()}, {"context_tokens": (5, 5)},
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong)).rstrip("s").partition("_")[0]):
        CalibrateConfig(**wrong)


def test_a_calibration_has_what_a_door_takes() -> None:
    cost = load_calibration("smollm2-cpu").cost
    assert RoutingConfig().measured().cost == cost
    own = replace(cost, constant_s=9.0)
    assert RoutingConfig(cost=own).measured().cost == own
    with pytest.raises(ConfigError, match="cannot read the config file /no/such"):
        RoutingConfig(calibration="/no/such.toml").measured()


def test_a_deployment_finds_its_calibration_beside_its_file(tmp_path: Path) -> None:
    file = tmp_path / "deployment.toml"
    file.write_text('[door.routing]\ncalibration = "mine.toml"\n[[instances]]\nname = "one"\nrole = "colocated"\n')
    with pytest.raises(ConfigError, match=f"cannot read the config file {tmp_path}/mine"):
        load_deployment(file)
    load_calibration("smollm2-cpu").save(tmp_path / "mine.toml")
    assert load_deployment(file).door.routing.calibration == str(tmp_path / "mine.toml")
    file.write_text('[[instances]]\nname = "one"\nrole = "colocated"\n')
    assert load_deployment(file).door.routing.calibration == "smollm2-cpu"


def test_a_simulation_takes_the_times_of_a_calibration() -> None:
    found = load_calibration("smollm2-cpu")
    question = Question(
        instances="colocated=1", policies="least_load", device=Path(__file__).parents[3] / _BUILT_IN_FILE
    )
    device = question.series()["least_load"].device
    assert (device.model, device.kv_link) == (found.cost, KVLink(link=found.link, bytes_per_token=46_080))
