"""Draws the losses of a training as a picture, beside the numbers in responses.json."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

#: Name of the picture in the output folder.
FILE: Final = "loss.png"
#: Names in the history, and how they are drawn.
_CURVES: Final = (("loss", "training"), ("eval_loss", "evaluation"))


def plot_history(history: Sequence[Mapping[str, float | None]], path: Path) -> bool:
    """Write the curves of loss (and reward, where there is one) by step as PNG; False without matplotlib or points.

    The file appears whole, by rename. Raises OSError.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return False
    names = [*_CURVES, *([("reward", "reward")] if any("reward" in entry for entry in history) else [])]
    curves = [
        (label, [(entry["step"], entry[name]) for entry in history if entry.get(name) is not None and "step" in entry])
        for name, label in names
    ]
    drawn = [(label, points) for label, points in curves if points]
    if not drawn:
        return False
    # The figure itself, without pyplot: no display, no state that outlives it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for label, points in drawn:
        axes.plot(*zip(*points, strict=True), label=label, marker="." if len(points) < 50 else "")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    try:
        figure.savefig(fresh, format="png", dpi=100)
        fresh.replace(path)
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()
    return True
