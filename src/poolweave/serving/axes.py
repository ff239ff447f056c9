"""Axes: how our pictures look, so that they look alike."""

from __future__ import annotations

from typing import Any

INK = "#2b2b2b"
_GRID = "#e4e4e4"
_FLOOR = "#bdbdbd"


def dress(axis: Any, title: str, unit: str, across: str = "") -> None:
    """Title, the unit upward, what runs across; a pale grid, and no frame but the floor."""
    axis.set_title(title, fontsize=11, loc="left", color=INK)
    axis.set_ylabel(unit, fontsize=9, color=INK)
    axis.set_xlabel(across, fontsize=9, color=INK)
    axis.tick_params(labelsize=8, colors=INK, length=0)
    axis.grid(axis="y", color=_GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(_FLOOR)
