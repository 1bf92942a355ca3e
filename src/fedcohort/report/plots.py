"""Curves as pictures (needs Matplotlib)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from fedcohort.report.tables import Curve


def draw_curves(
    curves: Sequence[Curve],
    path: str | os.PathLike[str],
    *,
    over: Literal["rounds", "megabytes"] = "rounds",
    target: float | None = None,
    title: str = "",
) -> None:
    """Draw accuracy over rounds or over megabytes sent; the ending of `path` picks the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for curve in curves:
        x = getattr(curve, over)
        (line,) = axes.plot(x, curve.mean, label=curve.policy, linewidth=1.6)
        axes.fill_between(x, curve.low, curve.high, color=line.get_color(), alpha=0.12)
    if target is not None:
        axes.axhline(target, color="grey", linestyle=":", linewidth=1)
    axes.set_xlabel("round" if over == "rounds" else "megabytes sent, both directions")
    axes.set_ylabel("test accuracy")
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
