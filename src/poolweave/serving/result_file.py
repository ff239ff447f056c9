"""What a run leaves on disk: a folder, and in it a JSON file of all that was shown and of each request."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from poolweave import __version__
from poolweave.errors import ConfigError
from poolweave.serving.flow_comparison.workload import TurnResult

Text = Callable[[Sequence[int]], str]


def out_folder(out: str) -> Path:
    """The folder for what is written, made before anything is run. Raises ConfigError."""
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {out}: {error.strerror}", setting="out", value=out) from error
    return Path(out)


def write_result(path: Path, config: Any, found: dict[str, Any]) -> str:
    """`found` behind who ran it, where and with which settings. -> what was written"""
    head = {
        "poolweave": __version__,
        "machine": {
            "cpus": len(os.sched_getaffinity(0)),
            "arch": platform.machine(),
            "python": platform.python_version(),
        },
        "settings": dataclasses.asdict(config),
    }
    text = json.dumps({**head, **found}, indent=2) + "\n"
    path.write_text(text, encoding="utf-8")
    return text


def request_row(result: TurnResult, text: Text) -> dict[str, Any]:
    """One request as plain values; `text` reads an answer's tokens."""
    row: dict[str, Any] = {"session": result.session, "turn": result.turn + 1, "prompt_tokens": len(result.prompt)}
    if result.record is None:
        return {**row, "error": f"{type(result.error).__name__}: {result.error}"}
    return {**row, **_figures(result, text)}


def _figures(result: TurnResult, text: Text) -> dict[str, Any]:
    record = result.record
    assert record is not None
    return {
        "answer": text(record.answer),
        "answer_tokens": len(record.answer),
        "finish_reason": record.finish_reason,
        "cached_tokens": record.cached_tokens,
        "matched_blocks": record.matched_blocks,
        "bytes_to_decode": record.to_decode.nbytes,
        "calls_to_decode": record.to_decode.calls,
        "bytes_to_prefill": record.to_prefill.nbytes,
        "calls_to_prefill": record.to_prefill.calls,
        "return_error": None if record.return_error is None else str(record.return_error),
        "ttft_s": round(record.ttft_s, 6),
        "jct_s": round(record.jct_s, 6),
    }
