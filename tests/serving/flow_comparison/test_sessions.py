"""Session files and the default set."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from poolweave.errors import ConfigError
from poolweave.serving.flow_comparison.sessions import DEFAULT_SESSIONS, Session, load_sessions, trim

ROWS = [
    {"session": 4, "turn": 1, "user": "and then?"},
    {"session": "b", "turn": 0, "input_delta": "other", "output_length": 5},
    {"session": 4, "turn": 0, "user": "tell me", "system": "be brief"},
]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.xz"])
def test_rows_become_sessions_in_order_of_turns(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"s.{suffix}"
    text = "\n\n".join(json.dumps(row) for row in ROWS).encode()
    file.write_bytes(lzma.compress(text) if suffix.endswith("xz") else text)
    assert load_sessions(file) == (
        Session(name="4", system="be brief", turns=("tell me", "and then?")),
        Session(name="b", turns=("other",)),
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no sessions"),
        (b"\n{", ":2 is not JSON"),
        (b"[1]", ":1 is not a JSON object"),
        (b'{"session": 1, "turn": 0}', ":1 has no text"),
        (b'{"session": 1, "turn": 0, "user": ""}', ":1 has no text"),
        (b'{"turn": 0, "user": "x"}', ":1 needs 'session'"),
        (b'{"session": 1, "turn": "0", "user": "x"}', ":1 needs 'session'"),
        (
            b'{"session": 1, "turn": 0, "user": "x"}\n{"session": 1, "turn": 0, "user": "y"}',
            ":2: session 1 has turn 0 twice",
        ),
        (b"\xff\xff", "is damaged"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "s.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_sessions(file)
    assert says in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_truncated_archive_and_a_missing_file_are_config_errors(tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl.xz"
    file.write_bytes(lzma.compress(b'{"session": 1, "turn": 0, "user": "x"}')[:-20])
    with pytest.raises(ConfigError, match="is damaged"):
        load_sessions(file)
    with pytest.raises(ConfigError, match="cannot read"):
        load_sessions(tmp_path / "none.jsonl")


def test_trim_keeps_the_first_sessions_and_turns() -> None:
    sessions = (Session(name="a", turns=("1", "2", "3"), system="s"), Session(name="b", turns=("1",)))
    assert trim(sessions, max_sessions=5, max_turns=2) == (
        Session(name="a", turns=("1", "2"), system="s"),
        Session(name="b", turns=("1",)),
    )
    assert trim(sessions, max_sessions=1, max_turns=9) == sessions[:1]


def test_the_default_set_is_varied_and_shares_a_system_prompt() -> None:
    assert 6 <= len(DEFAULT_SESSIONS) <= 8
    assert len({session.name for session in DEFAULT_SESSIONS}) == len(DEFAULT_SESSIONS)
    assert all(3 <= len(session.turns) <= 4 for session in DEFAULT_SESSIONS)
    shared = [session.system for session in DEFAULT_SESSIONS if session.system is not None]
    assert len(shared) > len(set(shared))
    assert any(session.system is None for session in DEFAULT_SESSIONS)


@pytest.mark.parametrize("turns", [(), ("",), ("a", "")])
def test_an_empty_turn_is_refused(turns: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="'x' has an empty turn"):
        Session(name="x", turns=turns)
