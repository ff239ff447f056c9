"""The cache study as one picture: MemServe's Figure 13 on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from poolweave.serving.axes import INK, dress
from poolweave.serving.bench.cache_study import CacheStudy

_COLOURS = ("#1b6e4f", "#f2a65a", "#4a90c4", "#8e6bbf", "#c65b5b")
_STYLES = {"hbm": "-", "dram": "--"}


def draw_cache_study(study: CacheStudy, path: Path) -> None:
    """Write the picture as PNG: a row a batch size, a column a prompt length, a line a block size and tier."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    config = study.config
    figure = Figure(
        figsize=(1 + 3.9 * len(config.tokens), 0.6 + 3.2 * len(config.batches)), dpi=140, layout="constrained",
        facecolor="white",
    )  # fmt: skip
    FigureCanvasAgg(figure)
    figure.suptitle(f"Time to first token by cached share: {config.model}, {config.dtype}", fontsize=11, color=INK)
    axes = figure.subplots(len(config.batches), len(config.tokens), squeeze=False)
    for row, batch in zip(axes, config.batches, strict=True):
        for axis, tokens in zip(row, config.tokens, strict=True):
            _panel(axis, study, batch, tokens)
    figure.savefig(path)


def _panel(axis: Any, study: CacheStudy, batch: int, tokens: int) -> None:
    dress(axis, f"{batch} x {tokens} tokens", "ms, mean", "% cached")
    colours = dict(zip(study.config.block_tokens, _COLOURS * len(study.config.block_tokens), strict=False))
    for (block, of_batch, of_tokens, tier), points in study.curves.items():
        if (of_batch, of_tokens) == (batch, tokens):
            axis.plot(
                [100 * point.cached_tokens / tokens for point in points], [point.mean_s * 1e3 for point in points],
                _STYLES[tier], marker="o", markersize=4, color=colours[block], label=f"blocks of {block}, {tier}",
            )  # fmt: skip
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7, frameon=False)
