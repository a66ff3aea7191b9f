"""One style for every picture, and one way to write it.

matplotlib is imported where something is drawn: it takes about as long as drawing.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.common.files import check_writable, write_atomically

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
HELP = "draw {} into this file (.png, .svg or .pdf)"
"""Help of an option that names a picture."""
BLUE, RED, GREEN, PURPLE, ORANGE, LIGHT_BLUE = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9",
)  # fmt: skip
"""Colours that people with a colour vision deficiency tell apart (Okabe and Ito 2008)."""
GREY = "#7f7f7f"
CYCLE = (BLUE, RED, GREEN, PURPLE, ORANGE, LIGHT_BLUE, GREY, "black")
_LINES = ("-", "--", ":", "-.")
"""Of curves beyond the eighth, the sixteenth and the twenty-fourth."""
_STYLE: Mapping[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "font.size": 9,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "savefig.dpi": 130,
    "svg.hashsalt": "zeroclap",  # the same content gives the same file
    "text.parse_math": False,  # a corpus may be called "$5_$10", which is no formula
}

_UNDATED: Mapping[str, Mapping[str, None]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


def check_file(path: Path | None) -> None:
    """Raise an error if a picture, which the option --plot names, cannot be written."""
    if path and path.suffix not in FORMATS:
        raise ValueError(f"--plot {path}: the name has to end in {', '.join(FORMATS)}")
    check_writable(path)


@contextmanager
def picture(width: float, height: float, *paths: Path) -> Iterator["Figure"]:
    """Yield an empty figure of so many inches, and write it when the block ends.

    Args:
        width: inches.
        height: inches.
        paths: files to write; the suffix of each, one of `FORMATS`, says in which form.
    """
    from cycler import cycler
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Some texts, such as those of ticks, are made by savefig only.
    cycle = cycler(linestyle=_LINES) * cycler(color=CYCLE)
    with rc_context({**_STYLE, "axes.prop_cycle": cycle}):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        for path in paths:
            content, kind = io.BytesIO(), path.suffix.removeprefix(".")
            figure.savefig(content, format=kind, metadata=_UNDATED.get(kind))
            write_atomically(path, content.getvalue())


def legend_below(figure: "Figure", columns: int = 2) -> None:
    """Add a legend below a figure, with each label of its axes once."""
    found: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns)


def plain_numbers(axis: "Axis") -> None:
    """Write plain numbers, not powers, at the ticks of a logarithmic axis."""
    from matplotlib.ticker import LogFormatter

    axis.set_major_formatter(LogFormatter())
    axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))


def axis_of_lengths(axes: "Axes", lengths: Sequence[int]) -> None:
    """Make the x axis one of input lengths in tokens: logarithmic, with a tick at each of them."""
    axes.set(xlabel="tokens of the input", xscale="log")
    axes.minorticks_off()
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
