"""Draw a corpus as one figure: lengths, sizes, rejects, and the share kept of each subset."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from data_prep import summary
from data_prep.common import pictures
from data_prep.common.wording import in_short
from data_prep.manifest import SPLITS, CorpusManifest, Count, LengthHistogram
from data_prep.summary import by_frequency

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = TypeVar("Row", bound=Mapping[str, int])

FILE_NAME = "corpus.png"
_MOST_BARS = 24  # subsets or reasons with their own bar
_REASONS_SHOWN = 3  # in the shares by subset
_LIGHT_RED = "#f0bf99"
_COLORS = (pictures.BLUE, pictures.RED, pictures.ORANGE, pictures.PURPLE, pictures.GREY)
_REST = "the rest"


def import_matplotlib() -> None:
    """Import matplotlib in advance, which takes about as long as drawing."""
    import matplotlib.backends.backend_agg  # noqa: F401


def draw(manifest: CorpusManifest, path: Path) -> None:
    """Draw a corpus: a panel for everything that has more than one part."""
    subsets = by_subset(manifest.kept)
    panels: list[Callable[[Axes], None]] = [
        lambda axes: _lengths(axes, manifest.length_histogram, manifest.settings.max_tokens)
    ]
    if manifest.rejects:
        panels.append(lambda axes: _rejects(axes, manifest))
    if len(subsets) > 1:
        panels.append(lambda axes: _tokens(axes, subsets))
    if len(subsets) > 1 and manifest.rejects:
        panels.append(lambda axes: _shares(axes, manifest))
    columns, rows = min(2, len(panels)), -(-len(panels) // 2)
    bars = max(len(subsets) * (rows - 1), 2 * len(manifest.rejects), 6)
    width, height = 6.5 * columns, 2.7 * rows + 0.24 * min(bars, _MOST_BARS)
    with pictures.picture(path, max(8, width), height) as figure:
        between = "   ·   " if columns > 1 else "\n"
        figure.suptitle(between.join(_summary(manifest)), fontsize=11)
        for place, panel in enumerate(panels, start=1):
            panel(figure.add_subplot(rows, columns, place))


def by_subset(kept: Mapping[str, Mapping[str, Count]]) -> dict[str, dict[str, int]]:
    """Return tokens by subset and split, largest subset first; the smallest of many are merged."""
    tokens: dict[str, dict[str, int]] = {}
    for split in SPLITS:
        for subset, count in kept.get(split, {}).items():
            tokens.setdefault(subset, dict.fromkeys(SPLITS, 0))[split] += count.tokens
    ordered = _largest_first(tokens)
    shown = dict(ordered[:_MOST_BARS])
    if rest := ordered[_MOST_BARS:]:
        shown[_REST] = {split: sum(counts[split] for _, counts in rest) for split in SPLITS}
    return shown


def shares(manifest: CorpusManifest) -> dict[str, dict[str, float]]:
    """Return for each subset the share of its text that was kept or rejected for each reason.

    They are shares of the bytes of text. The less frequent reasons are merged. Subsets and reasons
    are sorted, most frequent first, because the order of a manifest's dictionaries has no meaning.
    """
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for subsets in manifest.kept.values():
        for subset, count in subsets.items():
            counts[subset]["kept"] += count.text_bytes
    for rank, reason in enumerate(by_frequency(manifest.rejects)):
        name = reason if rank < _REASONS_SHOWN else _REST
        for subset, size in manifest.rejects[reason].text_bytes.items():
            counts[subset][name] += size
    return {
        subset: {name: number / max(row.total(), 1) for name, number in row.items()}
        for subset, row in _largest_first(counts)[:_MOST_BARS]
    }


def _largest_first(rows: Mapping[str, Row]) -> list[tuple[str, Row]]:
    return sorted(rows.items(), key=lambda item: (-sum(item[1].values()), item[0]))


def _summary(manifest: CorpusManifest) -> list[str]:
    parts = [
        f"{split} {in_short(total.documents)} documents, {in_short(total.tokens)} tokens"
        for split, total in manifest.totals.items()
    ]
    rejected = sum(rejects.count for rejects in manifest.rejects.values())
    share = 1 - (summary.rows(manifest)[0].share_of_text or 0.0)
    parts.append(f"{in_short(rejected)} documents rejected ({share:.1%} of the text)")
    return parts


def _lengths(axes: Axes, histogram: LengthHistogram, max_tokens: int | None) -> None:
    from matplotlib.ticker import LogLocator

    edges = [1, *histogram.upper_edges]
    bars = [(edges[i], edges[i + 1], n) for i, n in enumerate(histogram.counts) if n]
    lefts, rights, counts = zip(*bars, strict=True)
    widths = [right - left for left, right in zip(lefts, rights, strict=True)]
    axes.bar(
        lefts, counts, widths, align="edge", color=pictures.BLUE, edgecolor="white", linewidth=0.4
    )
    axes.margins(x=0.02, y=0.22)
    shares_over = {1024: histogram.share_over_1024, 2048: histogram.share_over_2048}
    limits = {n: f"{share:.1%} over {n:,}" for n, share in shares_over.items() if share}
    if max_tokens is not None:
        label = limits.get(max_tokens, f"over {max_tokens:,}")
        limits[max_tokens] = f"{label}\n(the limit here)"
    for number, (limit, label) in enumerate(sorted(limits.items())):
        side = "right" if number == 0 else "left"
        axes.axvline(limit, color=pictures.RED, linestyle="--", linewidth=1)
        axes.annotate(
            label,
            (limit, 0.98 if number < 2 else 0.84),
            xycoords=("data", "axes fraction"),
            xytext=(-4 if side == "right" else 4, 0),
            textcoords="offset points",
            horizontalalignment=side,
            verticalalignment="top",
            color=pictures.RED,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=8))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("tokens, <s> and </s> included")
    axes.set_ylabel("documents")
    axes.locator_params(axis="y", integer=True)
    axes.set_title("Lengths of encoded documents")


def _tokens(axes: Axes, subsets: Mapping[str, Mapping[str, int]]) -> None:
    totals = _stack(axes, subsets, SPLITS, (pictures.BLUE, pictures.LIGHT_BLUE))
    labels = [
        f" {in_short(total)}, {row['valid'] / max(total, 1):.2%} valid"
        for total, row in zip(totals, subsets.values(), strict=True)
    ]
    _label(axes, totals, labels)
    axes.set_title("Tokens by subset")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=2)


def _rejects(axes: Axes, manifest: CorpusManifest) -> None:
    rejected = summary.rows(manifest)[1 : _MOST_BARS + 1]
    axes.set_title("Rejected: share of the documents, and of the text")
    for number, row in enumerate(rejected):
        documents = f"{row.documents:,} documents, {row.share_of_documents:.1%}"
        bars = [(row.share_of_documents, documents, _LIGHT_RED), (*_text_bar(row), pictures.RED)]
        for place, (length, label, colour) in enumerate(bars):
            y = number + 0.4 * place - 0.2 * (len(bars) - 1)
            axes.barh(y, length, 0.36, color=colour)
            axes.text(length, y, f" {label}", verticalalignment="center")
    axes.set_yticks(range(len(rejected)), [row.name for row in rejected])
    _leave_room(axes, len(rejected))
    axes.set_xlim(0, 1.7)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def _text_bar(row: summary.Row) -> tuple[float, str]:
    """Return length and label of the bar for the text of a row."""
    tokens = ""
    if row.tokens is not None:
        tokens = f"{in_short(row.tokens)} tokens, {row.share_of_tokens:.1%}"
    if row.text_bytes is None or row.share_of_text is None:
        return row.share_of_tokens or 0.0, tokens
    label = f"{in_short(row.text_bytes)}B, {row.share_of_text:.1%}"
    return row.share_of_text, f"{label}; {tokens}" if tokens else label


def _shares(axes: Axes, manifest: CorpusManifest) -> None:
    rows, reasons = shares(manifest), by_frequency(manifest.rejects)
    found = {name for row in rows.values() for name in row}
    names = ("kept", *reasons[:_REASONS_SHOWN], _REST)
    _stack(axes, rows, [name for name in names if name in found], _COLORS)
    _label(axes, [1.0] * len(rows), [f" {row.get('kept', 0.0):.1%}" for row in rows.values()])
    axes.set_title("Share of bytes of text kept")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=5)
    axes.set_xticks([])


def _stack(
    axes: Axes,
    rows: Mapping[str, Mapping[str, float]],
    names: Sequence[str],
    colours: Sequence[str],
) -> list[float]:
    """Draw a bar for each row, divided by name; return the lengths of the bars."""
    lefts = [0.0] * len(rows)
    for name, colour in zip(names, colours, strict=False):
        widths = [row.get(name, 0) for row in rows.values()]
        axes.barh(list(rows), widths, left=lefts, color=colour, label=name)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    return lefts


def _label(axes: Axes, ends: Sequence[float], labels: Sequence[str]) -> None:
    """Finish horizontal bars: the first on top, a label next to each, no scale."""
    for number, (end, label) in enumerate(zip(ends, labels, strict=True)):
        axes.text(end, number, label, verticalalignment="center")
    axes.margins(x=0.3)
    axes.set_xlim(left=0)
    _leave_room(axes, len(labels))
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def _leave_room(axes: Axes, bars: int) -> None:
    """Put the first bar on top, and a few in the middle, so that they do not get thick."""
    room = max(0.0, (3 - bars) / 2)
    axes.set_ylim(bars - 0.4 + room, -0.6 - room)
