"""What ranks of one model send each other, measured between two processes: all-reduces, and sends to the next stage.

The other rank is a process of its own: `python -m poolweave.serving.engine.rank_exchanges RENDEZVOUS SPEC`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from poolweave.scheduler.operators import ExchangeSample
from poolweave.serving.engine.tensor_parallel import RankGroup

RANKS = 2
_REPEATS = 25  # the quickest counts: what else the machine does is not the exchange's time
_SIZES = 1 << 16, 1 << 20, 1 << 23  # bytes
_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSpec:
    """Activations of a model; the ranks compute with `num_threads` as an engine does."""

    hidden_size: int
    dtype: str
    num_threads: int = 1

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of an answer's step, and so many that their way takes longer than the call for it."""
        per_token = self.hidden_size * getattr(torch, self.dtype).itemsize
        return (1, *(-(-nbytes // per_token) for nbytes in _SIZES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanges:
    """`reduced`: all-reduces over RANKS; `sent`: from one rank to the other."""

    bytes_per_token: int
    reduced: tuple[ExchangeSample, ...]
    sent: tuple[ExchangeSample, ...]


def measure_exchanges(spec: ExchangeSpec) -> Exchanges:
    """Rank 0 is this process. Raises PeerLost when the other one does not come, or goes."""
    with tempfile.TemporaryDirectory(prefix="poolweave-ranks-") as folder:
        rendezvous = Path(folder) / "meet"
        command = [sys.executable, "-m", __spec__.name, str(rendezvous), json.dumps(asdict(spec))]
        other = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        try:
            with RankGroup(rendezvous, 0, RANKS, _WAIT_S) as group:
                found = _take_part(group, spec, 0)
            other.wait(_WAIT_S)
        finally:
            other.kill()
            other.wait()
    return found


def _take_part(group: RankGroup, spec: ExchangeSpec, rank: int) -> Exchanges:
    """What both ranks do in step; a send is timed as half of a way there and back."""
    dtype = getattr(torch, spec.dtype)
    reduced, sent = [], []
    for tokens in spec.tokens:
        tensor = torch.zeros(tokens, spec.hidden_size, dtype=dtype)
        nbytes = tensor.numel() * tensor.element_size()

        def there_and_back(tensor: torch.Tensor = tensor) -> None:
            for turn in range(2):
                (group.send if turn == rank else group.receive)(tensor, 1 - rank)

        def add_up(tensor: torch.Tensor = tensor) -> None:
            group.add_up(tensor)

        reduced.append(ExchangeSample(nbytes=nbytes, seconds=_quickest_s(add_up)))
        sent.append(ExchangeSample(nbytes=nbytes, seconds=_quickest_s(there_and_back) / 2))
    return Exchanges(bytes_per_token=spec.hidden_size * dtype.itemsize, reduced=tuple(reduced), sent=tuple(sent))


def _quickest_s(exchange: Callable[[], None]) -> float:
    """Of several, after one that connects."""
    seconds = []
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        exchange()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def _other_rank(rendezvous: str, spec: str) -> None:
    asked = ExchangeSpec(**json.loads(spec))
    torch.set_num_threads(asked.num_threads)
    with RankGroup(Path(rendezvous), 1, RANKS, _WAIT_S) as group:
        _take_part(group, asked, 1)


if __name__ == "__main__":
    _other_rank(*sys.argv[1:])
