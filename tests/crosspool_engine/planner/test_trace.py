"""Reading traces by their columns, and refusing what is none."""

from __future__ import annotations

import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from poolweave.crosspool_engine.planner import Trace, read_trace
from poolweave.errors import ConfigError


def test_own_columns_with_measured_service(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens,service_s\n7,100,10,2\n5,50,20,3\n")
    trace = read_trace(tmp_path / "t.csv")
    assert trace.arrival_s.tolist() == [0, 2]  # sorted, from the first
    assert trace.prompt_tokens.tolist() == [50, 100]
    assert trace.output_tokens.tolist() == [20, 10]
    assert trace.service_s.tolist() == [3, 2]
    assert trace.period_s == 4
    assert trace.rate_per_s == 0.5


def test_service_from_tokens_and_jsonl_in_milliseconds(tmp_path: Path) -> None:
    lines = '{"timestamp": 1000, "input_length": 8, "output_length": 4}\n' * 2
    (tmp_path / "t.jsonl.xz").write_bytes(lzma.compress((lines + lines.replace("1000", "3500")).encode()))
    trace = read_trace(tmp_path / "t.jsonl.xz", token_s=0.05)
    assert trace.arrival_s.tolist() == [0, 0, 2.5, 2.5]
    np.testing.assert_allclose(trace.service_s, 0.2)


def test_at_rate_keeps_requests_and_service() -> None:
    trace = Trace(np.arange(10.0), np.full(10, 5.0), np.full(10, 2.0), np.full(10, 3.0))
    fast = trace.at_rate(4.0)
    assert fast.rate_per_s == pytest.approx(4.0)
    assert fast.service_s.tolist() == trace.service_s.tolist()
    with pytest.raises(ConfigError, match="rate_per_s"):
        trace.at_rate(0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("arrival_s,prompt_tokens,output_tokens\n", "holds no requests"),
        ("arrival_s,prompt_tokens\n1,2\n", "no column for output"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2,x\n", "cannot be read"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2,3\n", "pass token_s"),
        ("arrival_s,prompt_tokens,output_tokens,service_s\n1,-2,3,1\n", "prompt_tokens"),
        ("arrival_s,prompt_tokens,output_tokens,service_s\n1,2,3,nan\n", "service_s"),
    ],
)
def test_refusals_name_what_is_wrong(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_trace(tmp_path / "t.csv")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv"):
        read_trace(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("name", "records", "prompt", "output"),
    [
        ("mooncake_conversation_trace.jsonl.xz", 12_031, 12_035, 343),
        ("AzureLLMInferenceTrace_conv.csv.xz", 19_366, 1_155, 211),
        ("vllm_measured_rtxpro6000_qwen3-30b-a3b.csv", 300, None, None),
        ("arena_multimodel_firsthalf.csv.xz", 713, None, None),
    ],
)
def test_published_traces(
    recorded: Callable[..., Path], name: str, records: int, prompt: int | None, output: int | None
) -> None:
    trace = read_trace(recorded(name), token_s=0.04)
    assert len(trace) == records
    if prompt is not None:
        assert round(trace.prompt_tokens.mean()) == prompt
        assert round(trace.output_tokens.mean()) == output
