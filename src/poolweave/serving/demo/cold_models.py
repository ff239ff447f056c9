"""The three cold models of the demo: which they are, and how users talk to each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from poolweave.serving.chat import Chat, load_chat
from poolweave.serving.engine.kept import kept_directory
from poolweave.serving.flow_comparison.workload import Talk
from poolweave.serving.instance.named_model import NamedModel

_HIDDEN, _LAYERS = 256, 4
_RANDOM = {"qwen3": "Qwen3-MoE, random weights", "deepseek": "DeepSeek-V2 (MLA), random weights"}
_FORMAT = 1  # of the kept directory


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoModel:
    """`about`: in a few words. `chat`: of a model whose answers are text."""

    served: NamedModel
    about: str
    talk: Talk
    chat: Chat | None = None

    def text(self, tokens: Sequence[int]) -> str:
        """An answer to read; of a model that knows no words, its tokens."""
        return " ".join(map(str, tokens)) if self.chat is None else self.chat.text(tokens)


class FoldedTalk:
    """The words of another tokenizer, folded into a small vocabulary: for models that know no words."""

    def __init__(self, talk: Talk, vocab: int) -> None:
        self._talk = talk
        self._vocab = vocab

    def opening(self, user: str, system: str | None = None) -> list[int]:
        return self._fold(self._talk.opening(user, system))

    def delta(self, user: str, answer: Sequence[int]) -> list[int]:
        return self._fold(self._talk.delta(user, answer))

    def _fold(self, tokens: Sequence[int]) -> list[int]:
        return [token % self._vocab for token in tokens]


def demo_models() -> tuple[DemoModel, ...]:
    """Made at the first call and kept. Raises ModelNotFound, ConfigError as upcycled_directory()."""
    from poolweave.crosspool_engine.models.random_models import VOCAB
    from poolweave.serving.engine.upcycled import upcycled_directory

    mixtral = upcycled_directory()
    chat = load_chat(str(mixtral))
    folder = kept_directory(f"random-moe-{_HIDDEN}x{_LAYERS}-{_FORMAT}", _save_random)
    folded = FoldedTalk(chat, VOCAB)
    real = DemoModel(
        served=NamedModel(name="mixtral", path=str(mixtral)), about="SmolLM2-135M upcycled to Mixtral", talk=chat,
        chat=chat,
    )  # fmt: skip
    return real, *(
        DemoModel(served=NamedModel(name=name, path=str(folder / name)), about=about, talk=folded)
        for name, about in _RANDOM.items()
    )


def _save_random(target: Path) -> None:
    from poolweave.crosspool_engine.models.random_models import save_random_models
    from poolweave.serving.engine.models import no_progress_bars

    with no_progress_bars():
        save_random_models(target, hidden=_HIDDEN, layers=_LAYERS, only=tuple(_RANDOM))
