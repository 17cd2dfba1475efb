"""How charts look: one drawing for paper, for light and for dark screens."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

INK, MUTED, LINE = "#23241f", "#62635a", "#dfddd4"
# The first is for plain decoding, the reference. Each is exchanged for a variable on the page.
SERIES = ("#85847a", "#3f7fc4", "#1f8a7d", "#b85c1e", "#8468c2", "#c08a2e", "#a63d63", "#5c7d2a",
          "#3d9bb0", "#7a5a44")  # fmt: skip
VARIABLES = {INK: "--ink", MUTED: "--muted", LINE: "--line",
             **{color: f"--s{number}" for number, color in enumerate(SERIES)}}  # fmt: skip

_SETTINGS: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": LINE,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.fonttype": "none",  # text stays text
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


@dataclass(frozen=True)
class Chart:
    """A picture and the numbers in it.

    Attributes:
        name: of its files.
        title: in a few words.
        caption: how to read it.
        figure: a matplotlib figure.
        header, rows: the numbers, for a CSV file.
    """

    name: str
    title: str
    caption: str
    figure: Any
    header: Sequence[str]
    rows: Sequence[Sequence[Any]] = field(default_factory=list)


@contextmanager
def look() -> Iterator[None]:
    """Settings of all charts, for drawing and for writing them.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError('reports need matplotlib: pip install "draftwood[bench]"') from error
    settings: Any = _SETTINGS
    with matplotlib.rc_context(settings):
        yield


def new_figure(width: float = 5.6, height: float = 3.0) -> tuple[Any, Any]:
    """(figure, axes) of a size in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def legend(axes: Any, columns: int = 1) -> None:
    """A legend beside the axes, so that it hides nothing."""
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), ncols=columns, borderaxespad=0)


def whole_numbers(axes: Any) -> None:
    """Ticks of the horizontal axis at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def svg(chart: Chart) -> str:
    """A chart as an SVG document; the same every time."""
    import matplotlib

    buffer = io.StringIO()
    with look(), matplotlib.rc_context({"svg.hashsalt": chart.name}):
        chart.figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def inline_svg(chart: Chart) -> str:
    """The same as an element of a page: ids of its own, and the page's colours."""
    text = svg(chart)
    text = text[text.index("<svg") :]
    # A style element would be the whole page's; the page has the two rules in it itself.
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{chart.name}-', text)
    text = re.sub(r'(href="|url\()#', rf"\1#{chart.name}-", text)
    for color, variable in VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    size = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', text)
    assert size is not None
    return text.replace(size.group(0), 'role="presentation"', 1)


def png(chart: Chart) -> bytes:
    """A chart on white."""
    buffer = io.BytesIO()
    with look():
        chart.figure.savefig(buffer, format="png", dpi=160, facecolor="white")
    return buffer.getvalue()
