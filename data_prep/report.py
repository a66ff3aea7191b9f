"""A corpus in one picture: lengths, sizes, rejects, and what was kept of each subset."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.files import write_atomically
from data_prep.manifest import SPLITS, CorpusManifest, Count, LengthHistogram, Rejects

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE_NAME = "corpus.png"
_MOST_BARS = 24  # subsets or reasons shown one by one
_REASONS_SHOWN = 3  # in the shares by subset
_BLUE, _LIGHT_BLUE, _RED = "#33658a", "#86bbd8", "#b5452f"
_REASON_COLOURS = ("#d1495b", "#edae49", "#7a6c9d", "#9a9a9a")
_REST = "the rest"


def import_matplotlib() -> None:
    """Import what `draw` needs beforehand; it takes about as long as drawing."""
    import matplotlib.backends.backend_agg  # noqa: F401


def draw(manifest: CorpusManifest, path: Path) -> None:
    """Draw a corpus as a PNG, there complete or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    subsets = by_subset(manifest.kept)
    rows = max(len(subsets), len(manifest.rejects), 6)
    figure = Figure(figsize=(13, 5.4 + 0.24 * min(rows, _MOST_BARS)))
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.15)
    FigureCanvasAgg(figure)
    figure.suptitle(_summary(manifest), fontsize=13)
    axes: Any = figure.subplots(2, 2)
    for each in axes.flat:
        each.spines[["top", "right"]].set_visible(False)
    _lengths(axes[0, 0], manifest.length_histogram, manifest.settings.max_tokens)
    _rejects(axes[0, 1], manifest)
    _tokens(axes[1, 0], subsets)
    _shares(axes[1, 1], shares(manifest), by_frequency(manifest.rejects))
    content = io.BytesIO()
    figure.savefig(content, dpi=110, format="png")
    write_atomically(path, content.getvalue())


def by_subset(kept: Mapping[str, Mapping[str, Count]]) -> dict[str, dict[str, int]]:
    """Tokens of each subset by split, largest subset first; the smallest of many are one."""
    tokens: dict[str, dict[str, int]] = {}
    for split in SPLITS:
        for subset, count in kept.get(split, {}).items():
            tokens.setdefault(subset, dict.fromkeys(SPLITS, 0))[split] += count.tokens
    ordered = sorted(tokens.items(), key=lambda item: (-sum(item[1].values()), item[0]))
    shown = dict(ordered[:_MOST_BARS])
    if rest := ordered[_MOST_BARS:]:
        shown[_REST] = {split: sum(counts[split] for _, counts in rest) for split in SPLITS}
    return shown


def by_frequency(rejects: Mapping[str, Rejects]) -> list[str]:
    """The reasons, most frequent first."""
    return sorted(rejects, key=lambda reason: (-rejects[reason].count, reason))


def shares(manifest: CorpusManifest) -> dict[str, dict[str, float]]:
    """For each subset, the share of its documents that was kept, and that each reason rejected.

    Reasons beyond the most frequent are one. Subsets and reasons are ordered, most first: the
    order of a manifest's dictionaries means nothing.
    """
    counts: dict[str, dict[str, int]] = {}
    for subsets in manifest.kept.values():
        for subset, count in subsets.items():
            row = counts.setdefault(subset, {})
            row["kept"] = row.get("kept", 0) + count.documents
    for rank, reason in enumerate(by_frequency(manifest.rejects)):
        name = reason if rank < _REASONS_SHOWN else _REST
        for subset, number in manifest.rejects[reason].by_subset.items():
            row = counts.setdefault(subset, {})
            row[name] = row.get(name, 0) + number
    ordered = sorted(counts.items(), key=lambda item: (-sum(item[1].values()), item[0]))
    return {
        subset: {name: number / sum(row.values()) for name, number in row.items()}
        for subset, row in ordered[:_MOST_BARS]
    }


def in_short(number: float) -> str:
    """A number in three digits or so, as "1.25 M"."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def _summary(manifest: CorpusManifest) -> str:
    parts = [
        f"{split} {in_short(total.documents)} documents, {in_short(total.tokens)} tokens"
        for split, total in manifest.totals.items()
    ]
    rejected = sum(rejects.count for rejects in manifest.rejects.values())
    return "   ·   ".join([*parts, f"{in_short(rejected)} rejected"])


def _lengths(axes: "Axes", histogram: LengthHistogram, max_tokens: int) -> None:
    from matplotlib.ticker import LogLocator

    edges = [1, *histogram.upper_edges]
    bars = [(edges[i], edges[i + 1], n) for i, n in enumerate(histogram.counts) if n]
    lefts, rights, counts = zip(*bars, strict=True)
    widths = [right - left for left, right in zip(lefts, rights, strict=True)]
    axes.bar(lefts, counts, widths, align="edge", color=_BLUE, edgecolor="white", linewidth=0.4)
    axes.margins(x=0.02, y=0.22)
    limits = {
        1024: f"{histogram.share_over_1024:.1%} over 1024",
        2048: f"{histogram.share_over_2048:.1%} over 2048",
    }
    limits[max_tokens] = limits.get(max_tokens, f"over {max_tokens}") + "\n(the limit here)"
    for number, (limit, label) in enumerate(sorted(limits.items())):
        side = "right" if number == 0 else "left"
        axes.axvline(limit, color=_RED, linestyle="--", linewidth=1)
        axes.annotate(
            label,
            (limit, 0.98 if number < 2 else 0.84),
            xycoords=("data", "axes fraction"),
            xytext=(-4 if side == "right" else 4, 0),
            textcoords="offset points",
            horizontalalignment=side,
            verticalalignment="top",
            color=_RED,
            fontsize=9,
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=8))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("tokens, <s> and </s> included")
    axes.set_ylabel("documents")
    axes.set_title("Document lengths before filtering", loc="left")


def _tokens(axes: "Axes", subsets: Mapping[str, Mapping[str, int]]) -> None:
    lefts = [0] * len(subsets)
    for split, colour in zip(SPLITS, (_BLUE, _LIGHT_BLUE), strict=True):
        counts = [row[split] for row in subsets.values()]
        axes.barh(list(subsets), counts, left=lefts, color=colour, label=split)
        lefts = [left + count for left, count in zip(lefts, counts, strict=True)]
    labels = [
        f" {in_short(sum(row.values()))}, {row['valid'] / max(sum(row.values()), 1):.2%} valid"
        for row in subsets.values()
    ]
    _label(axes, lefts, labels)
    axes.set_title("Tokens by subset", loc="left")
    axes.legend(loc="lower right", frameon=False)


def _rejects(axes: "Axes", manifest: CorpusManifest) -> None:
    axes.set_title("Rejected documents by reason", loc="left")
    counts = {reason: manifest.rejects[reason].count for reason in by_frequency(manifest.rejects)}
    ordered = dict(list(counts.items())[:_MOST_BARS])
    if not ordered:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "none", horizontalalignment="center", transform=axes.transAxes)
        return
    axes.barh(list(ordered), list(ordered.values()), color=_RED)
    axes.set_ylim(-0.6, max(len(ordered), 6) - 0.4)
    kept = sum(total.documents for total in manifest.totals.values())
    share_of = kept + sum(counts.values())
    labels = [f" {number:,} ({number / share_of:.2%})" for number in ordered.values()]
    _label(axes, list(ordered.values()), labels)


def _shares(axes: "Axes", rows: Mapping[str, Mapping[str, float]], reasons: Sequence[str]) -> None:
    found = {name for row in rows.values() for name in row}
    names = [name for name in ("kept", *reasons[:_REASONS_SHOWN], _REST) if name in found]
    colours = dict(zip(names, (_BLUE, *_REASON_COLOURS), strict=False))
    lefts = [0.0] * len(rows)
    for name in names:
        widths = [row.get(name, 0.0) for row in rows.values()]
        axes.barh(list(rows), widths, left=lefts, color=colours[name], label=name)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    _label(axes, [1.0] * len(rows), [f" {row.get('kept', 0.0):.1%}" for row in rows.values()])
    axes.set_title("Share of documents kept", loc="left")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=5, frameon=False)
    axes.set_xticks([])


def _label(axes: "Axes", ends: Sequence[float], labels: Sequence[str]) -> None:
    """Finish horizontal bars: the first on top, a label behind each, no scale."""
    for number, (end, label) in enumerate(zip(ends, labels, strict=True)):
        axes.text(end, number, label, verticalalignment="center", fontsize=9)
    axes.margins(x=0.3)
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
