"""Loaders of recorded traces, plain or .xz. Paths are arguments; where a file has no token ids, they are made up
from its lengths so that equal texts are equal and others are not."""

from __future__ import annotations

import csv
import json
import lzma
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from poolweave.errors import ConfigError
from poolweave.scheduler.prompt_tree import block_keys_of
from poolweave.serving.simulator.traces import TokenSource, Trace, TraceRequest, in_order

_MOONCAKE_BLOCK = 512
_BLOCK = 16
_WORDS = re.compile(r"\w+|[^\w\s]")


def load_mooncake(path: Path, seed: int = 0) -> Trace:
    """Mooncake's conversation trace: 512-token blocks by id; arrivals are spread inside their bins of 3 s.

    Its ids do not cover answers, so these are kept by nobody.
    """
    draw = np.random.default_rng(seed)
    requests = []
    for line in _lines(path):
        record = json.loads(line)
        keys = block_keys_of(np.array(record["hash_ids"], np.int32), 1)
        whole = keys[: record["input_length"] // _MOONCAKE_BLOCK]
        requests.append(
            TraceRequest(
                arrival_s=record["timestamp"] / 1e3 + float(draw.uniform(0, 3)),
                keys=whole,
                num_tokens=record["input_length"],
                output_tokens=max(record["output_length"], 1),
                answer_keys=whole,
            )
        )
    return in_order("mooncake", _MOONCAKE_BLOCK, requests)


def load_azure(path: Path, seed: int = 0) -> Trace:
    """Azure's conversation trace: lengths and times only, nothing is shared."""
    draw, requests, first = np.random.default_rng(seed), [], None
    for row in csv.DictReader(_lines(path)):
        stamp = datetime.fromisoformat(row["TIMESTAMP"][:26])
        first = stamp if first is None else first
        prompt, answer = max(int(row["ContextTokens"]), 1), max(int(row["GeneratedTokens"]), 1)
        keys = draw.integers(0, 2**64, (prompt + answer) // _BLOCK, dtype=np.uint64)
        requests.append(
            TraceRequest(
                arrival_s=(stamp - first).total_seconds(),
                keys=keys[: prompt // _BLOCK],
                num_tokens=prompt,
                output_tokens=answer,
                answer_keys=keys,
            )
        )
    return in_order("azure", _BLOCK, requests)


def load_sharegpt(path: Path, seed: int = 0) -> Trace:
    """Multi-turn ShareGPT sessions: a turn's prompt is the one before, its answer and the new question.

    A delta in the file holds the recorded answer and the next question. All sessions begin at 0.
    """
    source, requests = TokenSource(_BLOCK), []
    history: dict[int, list[Any]] = {}
    for line in _lines(path):
        record = json.loads(line)
        session, turn = record["session"], record["turn"]
        label = f"sharegpt-{seed}-{session}-{turn}"
        parts = history.setdefault(session, [])
        before = sum(len(part) for part in parts)
        parts.append(source.tokens(label, max(int(record["input_tokens_qwen"]) - before, 1)))
        answer = source.tokens(f"{label}-answer", max(int(record["output_length"]), 1))
        requests.append(source.request(0.0, parts, answer, f"sharegpt-{session}"))
        parts.append(answer)
    return in_order("sharegpt", _BLOCK, requests)


def load_loogle(path: Path, seed: int = 0, *, copies: int = 1, turns: int = 2, share: float = 1.0) -> Trace:
    """LooGLE long-dependency QA: a document, then one of its questions; a session asks `turns` of them.

    The file has five documents: `copies` makes up as many others of each length. Its beginning, `share` of it, is
    common to all sessions about it, the rest a session's own. All arrive at 0, interleaved.
    """
    source, rounds = TokenSource(_BLOCK), []
    for line in _lines(path):
        record = json.loads(line)
        for copy in range(copies):
            title = f"loogle-{seed}-{record['title']}-{copy}"
            length = int(record["doc_tokens_qwen"])
            common = source.tokens(title, round(length * share))
            for i, qa in enumerate(record["qa"]):
                session = f"{title}-{i // turns}"
                document = [common, source.tokens(f"{session}-own", length - len(common))]
                question = source.tokens(f"{title}-{i}", max(int(qa["q_tokens"]), 1))
                answer = source.tokens(f"{title}-{i}-answer", max(int(qa["a_tokens"]), 1))
                rounds.append((i, source.request(0.0, [*document, question], answer, session)))
    ordered = tuple(request for _, request in sorted(rounds, key=lambda r: r[0]))
    return Trace(name="loogle", block_tokens=_BLOCK, requests=ordered)


def load_react(path: Path, prefix_path: Path) -> Trace:
    """ReAct trajectories: step t's prompt is the common prefix, the question and all steps before t.

    Words and signs stand for tokens.
    """
    prefix, requests = _word_tokens(prefix_path.read_text()), []
    source = TokenSource(_BLOCK)
    for line in _lines(path):
        record = json.loads(line)
        parts = [prefix, _word_tokens(record["question"])]
        for step in record["steps"]:
            answer = _word_tokens(step["gen"])
            requests.append(source.request(0.0, parts, answer, f"react-{record['traj']}"))
            parts = [*parts, answer, _word_tokens(step["obs"])]
    return in_order("react", _BLOCK, requests)


TRACES: Mapping[str, Callable[[Path], Trace]] = {
    "mooncake": load_mooncake,
    "azure": load_azure,
    "sharegpt": load_sharegpt,
    "loogle": load_loogle,
    "react": lambda path: load_react(path, path.with_name("react_prompt_prefix.txt")),
}


def load_trace(kind: str, path: str | Path, load: Callable[[Path], Trace] | None = None) -> Trace:
    """The trace of this kind (see TRACES) in a file, as `load` reads it if given. Raises ConfigError for unknown kinds,
    for files that are missing and for those that hold something else."""
    if kind not in TRACES:
        raise ConfigError(f"trace kind {kind!r} is none of {', '.join(TRACES)}", setting="trace", value=kind)
    if not Path(path).is_file():
        raise ConfigError(f"there is no trace file {path}", setting="trace", value=str(path))
    try:
        return (load or TRACES[kind])(Path(path))
    except (KeyError, ValueError, TypeError, OSError, EOFError, lzma.LZMAError) as error:
        missing = isinstance(error, KeyError)
        why = f"it has no field {error}" if missing else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{path} cannot be read as a trace of kind {kind}: {why}; kinds are {', '.join(TRACES)}",
            setting="trace",
            value=str(path),
        ) from error


def _lines(path: Path) -> Iterator[str]:
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as file:
        yield from file


def _word_tokens(text: str) -> Any:
    """One made-up id a word or sign."""
    words = _WORDS.findall(text) or ["."]
    return np.array([xxhash.xxh32_intdigest(word.encode()) & 0x7FFFFFFF for word in words], np.int32)
