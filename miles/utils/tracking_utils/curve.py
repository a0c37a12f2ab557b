"""`curve.png`: reward and evaluation over the steps of a run."""

from __future__ import annotations

import gc
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles.utils.disk import write_whole

Points = Sequence[tuple[int, float]]


def draw_curve(path: str | Path, title: str, series: Mapping[str, Points]) -> None:
    """Draw each series of (step, value) points into a PNG, written beside its name and renamed; evaluations get markers.

    Raises MilesError when it cannot be written; an older drawing stays then.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for name, points in series.items():
        steps, values = [s + 1 for s, _ in points], [v for _, v in points]
        is_eval = name.startswith("eval/")
        axes.plot(steps, values, marker="o" if is_eval else None, linewidth=2 if is_eval else 1.2, label=name)
    axes.set_xlabel("steps done")
    axes.set_ylabel("reward")
    axes.set_title(title)
    axes.grid(visible=True, alpha=0.3)
    if series:
        axes.legend(loc="lower right")
    png = io.BytesIO()
    FigureCanvasAgg(figure).print_png(png)
    content = png.getvalue()
    del figure, axes, png
    gc.collect(1)  # a figure refers to itself, so that 30 MB of old ones would wait for the oldest generation's turn
    write_whole(path, content)
