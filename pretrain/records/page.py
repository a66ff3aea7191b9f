"""report.html: the report of a run as one page, with curves to zoom into.

Bokeh draws the curves: its script has 1.3 MB where plotly's has 4.8, and it has been released
several times a year under the BSD licence since 2013. The page holds all that it shows, and forbids
itself to load anything.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from data_prep.common import pictures
from pretrain.records import curves
from pretrain.records.curves import Curve, Floats, Mark, Panel
from pretrain.records.metrics import Line, finite_or_nan
from pretrain.records.status import RunView

if TYPE_CHECKING:
    from bokeh.models import ColumnDataSource, Range1d, Tabs
    from bokeh.plotting import figure

REPORT_PAGE = "report.html"
_MOST_POINTS = 2000
"""Of curves with the same label."""
_UNITS = {1e12: "trillion ", 1e9: "billion ", 1e6: "million ", 1e3: "thousand ", 1.0: ""}
"""Of tokens."""
_STYLES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        curves.RAW: {"color": pictures.BLUE, "alpha": 0.35},
        curves.SMOOTHED: {"color": pictures.BLUE, "line_width": 2},
        curves.VALIDATION: {"color": "black"},
        curves.ABANDONED: {"color": pictures.RED},
    }
)
_COLUMNS = 5
"""Of a legend."""
_MOST_DOTS = 100
"""Of a curve of evaluations; one with more is a line alone."""
_DASHES = ("solid", "dashed", "dotted")
_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 68rem; margin: 2rem auto;
       padding: 0 1rem; overflow-wrap: break-word; }
h1, h2 { line-height: 1.2; margin: 2rem 0 0.8rem; }
div.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ddd; padding: 0.25rem 1.2rem 0.25rem 0; text-align: left;
         vertical-align: top; }
code { background: #f3f3f3; padding: 0 0.2em; }
"""


def report_page(name: str, parts: tuple[str, str], seen: RunView, lines: Sequence[Line]) -> str:
    """Return a run's report as HTML.

    Args:
        name: of the run.
        parts: the report in Markdown, as far as it comes before the picture, and the rest.
        seen: the run, with at least one step.
        lines: of its metrics.jsonl, those of abandoned steps included.
    """
    from bokeh.embed import components
    from bokeh.resources import Resources

    happened = curves.marks(seen, lines)
    script, div = components(_tabs(seen, lines, happened), wrap_script=False)
    scripts = [*Resources("inline", components=["bokeh"], log_level="error").js_raw, script]
    scripts = [f"\n{each}\n" for each in scripts]
    hashes = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"
    first, rest = map(to_html, parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(name)}</title>
<style>{_CSS}</style>
</head>
<body>
{first}
{div}
{to_html(_explanation(happened, len(lines) > _MOST_POINTS))}
{rest}
{"".join(f"<script>{each}</script>" for each in scripts)}
</body>
</html>
"""


def to_html(text: str) -> str:
    """Return Markdown as HTML, in which the HTML, links and images of the text are inert."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.disable(["link", "image", "autolink", "reference"])
    tables = {"<table>": '<div class="table"><table>', "</table>": "</table></div>"}
    found = str(parser.render(text))
    for old, new in tables.items():
        found = found.replace(old, new)
    return found


def _explanation(happened: Sequence[Mark], is_long: bool) -> str:
    """What the reader has to know of the curves, in Markdown."""
    text = "Drag to zoom into a curve; a click on a name in a legend hides it."
    if is_long:
        text += " Of a long curve the lowest and highest points of each stretch are shown."
    marks = [f"{number}. {mark.text}" for number, mark in enumerate(happened, start=1)]
    return "\n".join([text, "", *marks])


def _tabs(seen: RunView, lines: Sequence[Line], happened: Sequence[Mark]) -> Tabs:
    """Bokeh's tabs: all panels by steps, and all by tokens."""
    from bokeh import models
    from bokeh.layouts import column

    before = curves.tokens_before(seen.lines)
    total = sum(line["tokens"] for line in seen.lines)
    size, unit = next((size, unit) for size, unit in _UNITS.items() if total >= size or size == 1)
    sources = {}
    for panel in (panels := _panels(seen, lines)):
        by_label: dict[str, list[Curve]] = {}
        for curve in panel.curves:
            by_label.setdefault(curve.label, []).append(curve)
        sources[panel.title] = {
            label: models.ColumnDataSource(_points(parts, before, size))
            for label, parts in by_label.items()
        }
    marks = models.ColumnDataSource(_columns(happened, before, size))
    tabs = []
    units = {"steps": "steps", "tokens": f"{unit}tokens"}
    for axis in units:
        places = [s.data[axis] for found in sources.values() for s in found.values()]
        first, end = (float(of(np.concatenate(places))) for of in (np.min, np.max))
        margin = 0.02 * (end - first or 1.0)
        shared = models.Range1d(first - margin, end + margin)
        figures = [
            _figure(panel, sources[panel.title], marks, shared, axis, units) for panel in panels
        ]
        tabs.append(
            models.TabPanel(child=column(figures, sizing_mode="stretch_width"), title=f"by {axis}")
        )
    return models.Tabs(tabs=tabs, sizing_mode="stretch_width")


def _panels(seen: RunView, lines: Sequence[Line]) -> list[Panel]:
    """The panels that have something to show."""
    validation = seen.validation
    by_corpus = [
        dataclasses.replace(curve, label=name)
        for name, loss in curves.corpora(validation).items()
        for curve in curves.validation_curves(validation, loss)
    ]
    measured = [value for curve in by_corpus for value in curve.values]
    title = "validation loss by corpus"
    found = [
        *curves.loss_panels(seen, lines),
        Panel(title, "nats per target", by_corpus, curves.ends(measured)),
        curves.panel(seen, lines, "learning rate", "", _of("learning_rate"), smooth=False),
        curves.panel(seen, lines, "gradient norm", "before clipping", _of("gradient_norm")),
    ]
    return [each for each in found if math.isfinite(each.ends[0])]


def _of(key: str) -> curves.Value:
    return lambda line: finite_or_nan(line[key])


def _points(
    found: Sequence[Curve], before: Callable[[Sequence[float]], Floats], size: float
) -> dict[str, npt.NDArray[Any]]:
    """The columns of curves with the same label, with a gap between one and the next.

    Args:
        found: the curves.
        before: gives the tokens that were read before some steps.
        size: the unit of the tokens.
    """
    number = sum(len(curve.lines) for curve in found)
    steps, tokens, values = [], [], []
    for curve in found:
        read = before(curve.steps)
        if curve.kind == curves.ABANDONED:
            own = np.cumsum([line["tokens"] for line in curve.lines])
            read = read[0] + own - own[0]
        kept = _thinned(curve.values, _MOST_POINTS * len(curve.lines) // number)
        steps.append(np.array(curve.steps)[[*kept, kept[-1]]])
        tokens.append(read[[*kept, kept[-1]]] / size)
        values.append(np.append(curve.values[kept], math.nan))
    return {
        "steps": np.concatenate(steps).astype(np.int32),
        "tokens": np.concatenate(tokens),
        "value": np.concatenate(values).astype(np.float32),
    }


def _thinned(values: Floats, most: int) -> list[int]:
    """Places of about `most` values: the first, and the lowest and highest of each stretch."""
    if len(values) <= most:
        return [*range(len(values))]
    found = {0, len(values) - 1}
    for part in np.array_split(np.arange(len(values)), max(1, most // 2)):
        finite = part[np.isfinite(values[part])]
        if len(finite):
            found |= {int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])}
    return sorted(found)


def _columns(
    happened: Sequence[Mark], before: Callable[[Sequence[float]], Floats], size: float
) -> dict[str, Any]:
    """The columns of marks."""
    places: dict[str, Sequence[float]] = {
        "": [mark.step for mark in happened],
        "_first": [mark.again.start if mark.again else math.nan for mark in happened],
        "_end": [mark.again.stop if mark.again else math.nan for mark in happened],
    }
    return {
        "text": [f"{number}: {mark.text}" for number, mark in enumerate(happened, start=1)],
        "color": [mark.color for mark in happened],
        **{f"steps{name}": steps for name, steps in places.items()},
        **{f"tokens{name}": before(steps) / size for name, steps in places.items()},
    }


def _figure(
    panel: Panel,
    sources: Mapping[str, ColumnDataSource],
    marks: ColumnDataSource,
    shared: Range1d,
    axis: str,
    units: Mapping[str, str],
) -> figure:
    """Draw a panel along an axis, "steps" or "tokens"."""
    from bokeh.models import HoverTool, Legend, NumeralTickFormatter
    from bokeh.plotting import figure

    low, high = panel.ends
    margin = max(0.05 * (high - low), 0.005 * abs(high)) or 1.0
    drawn = figure(
        height=330 + 25 * -(-len(sources) // _COLUMNS), sizing_mode="stretch_width",
        title=panel.title or "loss",
        x_range=shared, y_range=(low - margin, high + margin),
        tools="pan,box_zoom,wheel_zoom,reset,save", active_drag="box_zoom", active_scroll=None,
        x_axis_label=units[axis], y_axis_label=panel.unit,
    )  # fmt: skip
    drawn.toolbar.logo = None
    drawn.xaxis.formatter = NumeralTickFormatter(format="0,0.[000]")
    drawn.vstrip(f"{axis}_first", f"{axis}_end", source=marks, color="color", alpha=0.12)
    spans = drawn.vspan(axis, source=marks, color="color", line_dash="dashed")
    drawn.add_tools(HoverTool(renderers=[spans], tooltips=[("", "@text")]))
    numbers = curves.numbers_of_marks(marks.data[axis], shared.end - shared.start)
    top = [high + margin] * len(numbers)
    drawn.text(
        [*numbers], top, [*numbers.values()], text_font_size="11px", text_baseline="top", x_offset=3
    )
    legend = Legend(
        click_policy="hide", orientation="horizontal", ncols=_COLUMNS, spacing=10, padding=2,
        location="left", margin=0, border_line_color=None,
    )  # fmt: skip
    drawn.add_layout(legend, "below")
    dotted = {curve.label for curve in panel.curves if curve.kind == curves.VALIDATION}
    for name, style in _styles(panel).items():
        options = {"source": sources[name], "legend_label": name, "name": name, **style}
        found = [drawn.line(axis, "value", **options)]
        if name in dotted and len(sources[name].data["value"]) <= _MOST_DOTS:
            found.append(drawn.scatter(axis, "value", size=5, **options))
        places = [(unit, f"@{axis}{{0,0.[000]}}") for axis, unit in units.items()]
        tips = [("", "$name"), *places, ("value", "@value")]
        drawn.add_tools(HoverTool(renderers=found, tooltips=tips))
    return drawn


def _styles(panel: Panel) -> dict[str, Mapping[str, Any]]:
    """How to draw the curves of each label."""
    kinds = {curve.label: curve.kind for curve in panel.curves}
    if {*kinds.values()} == {curves.VALIDATION}:  # a curve for each corpus
        dashes = [dash for dash in _DASHES for _ in pictures.CYCLE]
        looks = itertools.cycle(zip(itertools.cycle(pictures.CYCLE), dashes))
        return {
            name: {"color": color, "line_dash": dash}
            for name, (color, dash) in zip(kinds, looks, strict=False)
        }
    return {label: _STYLES[kind] for label, kind in kinds.items()}
