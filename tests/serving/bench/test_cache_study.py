"""`poolweave bench cache` on a small random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from poolweave.errors import ConfigError
from poolweave.serving.bench.cache_study import CachePoint, CacheStudy, CacheStudyConfig
from poolweave.serving.cli.app import app


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_every_combination_is_measured_once(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from ref_transformers import save_random_model

    options = [
        "--model", str(save_random_model("llama", tmp_path / "model")), "--out", str(tmp_path / "out"), "--tokens",
        "20,64", "--ratios", "0.9,0,0.5", "--batches", "1,3", "--blocks", "8,16", "--repeats", "2", "--json",
    ]  # fmt: skip
    result = CliRunner().invoke(app, ["bench", "cache", *options])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    measured = [(p["block_tokens"], p["batch"], p["tokens"], p["tier"], p["cached_tokens"]) for p in told["points"]]
    whole_blocks = {(8, 20): (0, 8, 16), (8, 64): (0, 32, 56), (16, 20): (0, 16), (16, 64): (0, 32, 48)}
    assert sorted(measured) == sorted(
        (block, batch, tokens, tier, cached)
        for (block, tokens), each in whole_blocks.items()
        for cached in each
        for batch in (1, 3)
        for tier in ("hbm", "dram")
    )
    assert all(0 < point["mean_s"] <= point["last_s"] for point in told["points"])
    (picture,) = (tmp_path / "out").glob("cache-*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    (kept,) = (tmp_path / "out").glob("cache-*.json")
    assert json.loads(kept.read_text()) == told


@pytest.mark.engine
def test_the_cached_part_is_not_computed_and_comes_from_its_tier(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from ref_transformers import save_random_model

    from poolweave.serving.engine import load_model
    from poolweave.serving.engine.probe import EngineProbe, ProbePoint, ProbeRoom
    from poolweave.types import Tier

    model = load_model(save_random_model("llama", tmp_path / "model"))
    with EngineProbe(model, ProbeRoom(max_tokens=100, batch=2, dram=True)) as probe:
        for tier in (Tier.HBM, Tier.DRAM):
            point = ProbePoint(prompt_tokens=90, cached_tokens=64, batch=2, tier=tier)
            probe.first_tokens_s(point)  # makes the history
            before, moved = probe.engine.stats().computed_tokens, probe.pool.stats().events.get("swapped_in", 0)
            assert len(probe.first_tokens_s(point)) == 2
            assert probe.engine.stats().computed_tokens - before == 2 * (90 - 64)
            assert probe.pool.stats().events.get("swapped_in", 0) - moved == (8 if tier is Tier.DRAM else 0)
        probe.pool.check()
    with pytest.raises(ConfigError, match="the model has 1024 positions"):
        EngineProbe(model, ProbeRoom(max_tokens=1024))


def test_what_does_not_fall_is_told() -> None:
    times = {0: 0.4, 16: 0.2, 32: 0.3}
    points = [
        CachePoint(tokens=64, cached_tokens=cached, batch=2, block_tokens=16, tier="dram", mean_s=mean, last_s=mean)
        for cached, mean in times.items()
    ]
    study = CacheStudy(config=CacheStudyConfig(), points=tuple(reversed(points)))
    assert study.surprises == ["2 x 64 tokens, blocks of 16 in dram: 32 cached took 300.0 ms, 16 took 200.0 ms"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--ratios", "1"), "ratios=(1.0,) must name at least one value, each in [0, 1)"),
        (("--tiers", "ssd"), "tiers: 'ssd' is not one of hbm, dram"),
        (("--repeats", "0"), "repeats=0 must be at least 1"),
        (("--full", "--config", "x.toml"), "give one of them"),
        (("--out", "/proc/nowhere"), "choose another --out"),
        (("--model", "/nowhere"), "'/nowhere' is no directory"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    out = () if "--out" in arguments else ("--out", str(tmp_path))
    result = CliRunner().invoke(app, ["bench", "cache", *out, *arguments])
    assert says in str(result.exception)


def test_the_full_study_asks_for_more_of_everything() -> None:
    quick, full = CacheStudyConfig(), CacheStudyConfig.full()
    assert full.num_points > quick.num_points
    assert max(full.tokens) > max(quick.tokens)
