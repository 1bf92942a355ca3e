"""Curves as pictures (needs Matplotlib)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from fedcohort.report.tables import Curve

SHADED = 4  # more bands than this only hide the curves


def draw_curves(
    curves: Sequence[Curve],
    path: str | os.PathLike[str],
    *,
    over: Literal["rounds", "megabytes"] = "rounds",
    target: float | None = None,
    title: str = "",
) -> None:
    """Draw accuracy over rounds or over megabytes sent; the ending of `path` picks the format.

    The legend lists the curves from the best end to the worst. One standard deviation is shaded
    where there are few enough curves to tell the bands apart.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ranked = sorted(curves, key=lambda c: -sum(c.mean[-10:]) / max(1, len(c.mean[-10:])))
    for i, curve in enumerate(ranked):
        x = getattr(curve, over)
        style = ("-", "--", ":")[i // 10 % 3]
        (line,) = axes.plot(x, curve.mean, label=curve.policy, linewidth=1.5, linestyle=style)
        if len(curves) <= SHADED:
            axes.fill_between(x, curve.low, curve.high, color=line.get_color(), alpha=0.15)
    if target is not None:
        axes.axhline(target, color="gray", linestyle=":", linewidth=1)
    axes.set_xlabel("round" if over == "rounds" else "megabytes sent, both directions")
    axes.set_ylabel("test accuracy")
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150)
