"""Multi-turn sessions: what users say, turn by turn. Knows no tokens and no model."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poolweave.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One conversation: an optional system prompt and the user's words, one text a turn."""

    name: str
    turns: tuple[str, ...]
    system: str | None = None

    def __post_init__(self) -> None:
        if not self.turns or not all(isinstance(turn, str) and turn for turn in self.turns):
            raise ConfigError(f"session {self.name!r} has an empty turn or none at all", setting="sessions")


def load_sessions(path: str | Path) -> tuple[Session, ...]:
    """Sessions of a JSON-lines file, plain or .xz: one turn a line, in the order in which sessions first appear.

    A line holds `session` (any id), `turn` (a number), `user` or `input_delta` (its text) and perhaps `system`.
    Raises ConfigError naming the file and line for what cannot be read.
    """
    turns: dict[str, dict[int, str]] = {}
    systems: dict[str, str] = {}
    for number, row in _rows(Path(path)):
        name, turn, text = _turn(row, f"{path}:{number}")
        if turn in turns.setdefault(name, {}):
            raise ConfigError(f"{path}:{number}: session {name} has turn {turn} twice", setting="sessions")
        turns[name][turn] = text
        if isinstance(row.get("system"), str):
            systems.setdefault(name, row["system"])
    if not turns:
        raise ConfigError(f"{path} holds no sessions; write one JSON object a line", setting="sessions")
    return tuple(
        Session(name=name, turns=tuple(said[turn] for turn in sorted(said)), system=systems.get(name))
        for name, said in turns.items()
    )


def trim(sessions: Sequence[Session], *, max_sessions: int, max_turns: int) -> tuple[Session, ...]:
    """The first `max_sessions` sessions, each cut to its first `max_turns` turns."""
    return tuple(
        Session(name=session.name, turns=session.turns[:max_turns], system=session.system)
        for session in sessions[:max_sessions]
    )


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        text = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        lines = text.decode("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the sessions file {path}: {error.strerror}", setting="sessions") from error
    except (lzma.LZMAError, UnicodeDecodeError) as error:
        raise ConfigError(f"the sessions file {path} is damaged: {error}", setting="sessions") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{number} is not JSON: {error}", setting="sessions") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number} is not a JSON object", setting="sessions")
        yield number, row


def _turn(row: Mapping[str, Any], where: str) -> tuple[str, int, str]:
    text = row.get("user", row.get("input_delta"))
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{where} has no text; give it as 'user' or 'input_delta'", setting="sessions")
    turn = row.get("turn")
    if "session" not in row or not isinstance(turn, int) or isinstance(turn, bool):
        raise ConfigError(f"{where} needs 'session' (any id) and 'turn' (a whole number)", setting="sessions")
    return str(row["session"]), turn, text


_GUIDE = (
    "You are the guide of a small science museum. Visitors of every age ask you things. Answer in one or two plain "
    "sentences, name one exhibit that shows it, and never invent numbers."
)
_COOK = (
    "You are a patient cooking teacher in an evening class for beginners. Give one practical step at a time, say why "
    "it matters, and warn of the usual mistake."
)

DEFAULT_SESSIONS: tuple[Session, ...] = (
    Session(
        name="tides",
        system=_GUIDE,
        turns=(
            "Why does the sea rise and fall twice a day, and not just once?",
            "So what does the Sun do to it? Is it ever stronger than the Moon?",
            "My daughter asks: would a lake have tides too?",
        ),
    ),
    Session(
        name="bread",
        system=_COOK,
        turns=(
            "My bread comes out dense like a brick. I use flour, water, salt and dry yeast, and let it stand an hour.",
            "The kitchen is cold, about 17 degrees. What should I change first?",
            "And how can I tell that the dough is ready for the oven?",
        ),
    ),
    Session(
        name="colours",
        system=_GUIDE,
        turns=(
            "Why is the sky blue in the day but red in the evening?",
            "Then why are clouds white?",
            "What colour would the sky have on Mars?",
        ),
    ),
    Session(
        name="postcard",
        turns=(
            "Write a postcard of three lines from a lighthouse keeper to his sister in the city.",
            "Now her answer. She has just missed the last tram.",
            "One more from him: the fog came in and he thinks of the tram.",
        ),
    ),
    Session(
        name="knife",
        system=_COOK,
        turns=(
            "Which knife should I buy if I can only afford one?",
            "How do I keep it sharp without special tools?",
            "What must I never cut with it?",
        ),
    ),
    Session(
        name="loops",
        turns=(
            "Explain to a twelve-year-old what a loop in a program is, with an everyday example.",
            "Show the same example as five lines of Python.",
            "What happens if the loop never ends? How would I notice?",
        ),
    ),
    Session(
        name="heavier",
        system=_GUIDE,
        turns=(
            "What falls faster, a hammer or a feather?",
            "An astronaut dropped both on the Moon. What did he see?",
            "Could we show that here in the museum?",
        ),
    ),
    Session(
        name="riddle",
        turns=(
            "I have cities but no houses, rivers but no water, and forests but no trees. What am I?",
            "Make up a riddle like that about a clock.",
            "Give me a hint that does not spoil it.",
        ),
    ),
)
