"""Sequences and settings are plain values: they need no torch, and say what is left to do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from poolweave.serving.engine import SamplingParams, Sequence


@pytest.mark.multiproc
def test_sequences_and_settings_load_no_torch() -> None:
    code = (
        "import sys; from poolweave.serving.engine import EngineConfig, SamplingParams, Sequence;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_prompt_and_answer_are_told_apart() -> None:
    sequence = Sequence("r", [1, 2, 3, 4], num_prompt=3, num_computed=2)
    assert (sequence.answer, sequence.num_answer, sequence.num_pending, sequence.finished) == ([4], 1, 2, False)
    assert Sequence("r", [1, 2]).num_prompt == 2


def test_a_seed_is_drawn_where_none_is_given() -> None:
    assert Sequence("r", [1], SamplingParams(seed=7)).seed == 7
    assert len({Sequence("r", [1]).seed for _ in range(20)}) == 20


def test_stop_takes_one_string_or_several() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
