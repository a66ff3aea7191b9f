"""What `evaluate` shows and writes: tables, JSON and CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from data_prep.common.files import write_atomically, write_json
from pretrain.models.evaluation_plots import draw_layers, draw_scores, short_number
from pretrain.models.layers import LayerChanges
from pretrain.models.scores import INTERVAL, Evaluation, Measured, Refusal, Score

_COLUMNS = (
    "model,trained length,length,stride,part,targets,loss,perplexity,accuracy,"
    "standard error of accuracy"
)
_LAYER_COLUMNS = "model,layer,distance,cosine,degrees,blocks,tokens"


def heading(counted: str, interpolate: bool) -> str:
    """The first line of a table of `table_rows`.

    Args:
        counted: "windows" or "blocks".
        interpolate: with the column of position interpolation.
    """
    return (
        f"{'length':>8} {counted:>10} {'targets':>12} {'coverage':>9} {'loss':>8} "
        f"{'perplexity':>11} {'accuracy':>9}{' interpolated' if interpolate else ''}\n"
    )


def table_rows(result: Evaluation | Refusal, interpolate: bool) -> str:
    """Lines of the table: the total, each term and each subset where there are several.

    The total over several terms has a loss, but neither a perplexity nor an accuracy.
    """
    if isinstance(result, Refusal):
        return f"{result.length:>8} refused: {result.refused}\n"
    first, terms = f"{result.length:>8} {result.blocks:>10,}", result.terms
    if len(terms) == 1:  # of windows of documents, which are not pairs: the same as the total
        terms = {}
    coverage, last = f"{result.coverage:.1%}", _interpolated(result, interpolate)
    lines = [_row(first, coverage, result.total, last, summed=bool(terms))]
    empty = " " * len(first)
    lines += [_row(empty, "", score, f"  {name}") for name, score in terms.items()]
    if len(result.subsets) > 1:
        lines += [
            _row(empty, "", score, f"  {name}", summed=bool(terms))
            for name, score in result.subsets.items()
        ]
    return "".join(lines)


def _row(first: str, coverage: str, score: Score, last: str, *, summed: bool = False) -> str:
    perplexity, accuracy = f"{score.perplexity:.2f}", f"{score.accuracy:.1%}"
    if summed:
        perplexity = accuracy = "-"
    return (
        f"{first} {score.targets:>12,} {coverage:>9} {score.loss:>8.4f} {perplexity:>11} "
        f"{accuracy:>9}{last}\n"
    )


def _interpolated(result: Evaluation, interpolate: bool) -> str:
    if not interpolate:
        return ""
    return f"{result.interpolated.perplexity:>13.2f}" if result.interpolated else f"{'-':>13}"


def position_table(evaluations: Sequence[Evaluation]) -> str:
    """Perplexity by position in the window: a line for each length, a column for each group."""
    groups = [each.perplexity_by_position for each in evaluations]
    edges = sorted({edge for found in groups for edge in found})
    if not edges:
        return ""
    title = "perplexity by the number of tokens before the target in its window, from\n"
    lines = [("length", *map(str, edges))]
    for each, found in zip(evaluations, groups, strict=True):
        lines.append((str(each.length), *(short_number(found.get(edge)) for edge in edges)))
    return title + "".join(
        f"{first:>8}" + "".join(f" {cell:>9}" for cell in cells) + "\n" for first, *cells in lines
    )


def pair_table(measured: Sequence[Measured]) -> str:
    """The accuracy of models with a pair head, as in table 5 of Lan et al. 2020."""
    found = [(m, result.pairs) for m in measured for result in m.evaluations if result.pairs]
    if not found:
        return ""
    width = max(5, *(len(each.model) for each, _ in found))
    title = (
        "accuracy ± its standard error, of masked tokens and of each task's pairs\n"
        "MLM: of pairs in their order; `masked` above: of pairs as in training, also false ones\n"
    )
    names = f"{'tokens':>9} {'MLM':>15} {'pairs':>8} {'NSP':>15} {'SOP':>15}"
    return f"{title}{'model':<{width}}  trained on {names}\n" + "".join(
        f"{each.model:<{width}}  {each.pair_task:<10} {scores['masked'].targets:>9,} "
        f"{_accuracy(scores['masked'])} {scores['sop'].targets:>8,} {_accuracy(scores['nsp'])} "
        f"{_accuracy(scores['sop'])}\n"
        for each, scores in found
    )


def _accuracy(score: Score) -> str:
    return f"{score.accuracy:>7.1%} ± {score.accuracy_error:>5.1%}"


def layer_table(found: Mapping[str, LayerChanges]) -> str:
    """A line for each layer, and three columns for each model."""
    lines = [
        f"{name}: {each.tokens:,} tokens in {each.blocks:,} blocks of {each.length:,}\n"
        for name, each in found.items()
    ]
    lines.append("input and output of each layer: L2 distance, cosine similarity, and angle\n")
    widths = [max(30, len(name) + 3) for name in found]
    groups = list(zip(found.values(), widths, strict=True))
    lines.append(" " * 5 + "".join(f"{n:>{w}}" for n, w in zip(found, widths, strict=True)) + "\n")
    columns = f"{'distance':>11}{'cosine':>9}{'degrees':>9}"
    lines.append("layer" + "".join(f"{columns:>{width}}" for width in widths) + "\n")
    for number in range(max(len(each.layers) for each in found.values())):
        cells = [_layer_cells(each, number).rjust(width) for each, width in groups]
        lines.append(f"{number + 1:>5}{''.join(cells)}\n")
    return "".join(lines)


def _layer_cells(found: LayerChanges, number: int) -> str:
    if number >= len(found.layers):
        return ""
    layer = found.layers[number]
    return f"{layer.distance:>11.3f}{layer.cosine:>9.4f}{layer.degrees:>9.2f}"


def refusals(measured: Sequence[Measured]) -> list[str]:
    """Which lengths could not be measured, and why; with the model where there are several."""
    return [
        f"{each.model + ', ' if len(measured) > 1 else ''}length {result.length}: {result.refused}"
        for each in measured
        for result in each.results
        if isinstance(result, Refusal)
    ]


def write_scores(
    measured: Sequence[Measured],
    json: Path | None = None,
    table: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Write the files that have a name."""
    if json:
        write_json(json, [_as_json(m, result) for m in measured for result in m.results])
    if table:
        write_atomically(table, scores_as_csv(measured).encode())
    if plot:
        draw_scores(measured, plot)


def _as_json(measured: Measured, result: Evaluation | Refusal) -> dict[str, object]:
    values = {
        **dataclasses.asdict(result),
        "model": measured.model,
        "trained_length": measured.trained_length,
    }
    if isinstance(result, Evaluation) and result.interval:
        values["interval_kind"] = INTERVAL
    if isinstance(result, Evaluation) and measured.pair_task:
        values["pair_task"] = measured.pair_task
        for name, score in result.pairs.items():
            values["pairs"][name]["standard_error"] = score.accuracy_error
    return values


def write_layers(
    found: Mapping[str, LayerChanges], json: Path | None, table: Path | None, plot: Path | None
) -> None:
    """Write the files that have a name."""
    if json:
        write_json(
            json, [{"model": name, **dataclasses.asdict(each)} for name, each in found.items()]
        )
    if table:
        write_atomically(table, layers_as_csv(found).encode())
    if plot:
        draw_layers(found, plot)


def layers_as_csv(found: Mapping[str, LayerChanges]) -> str:
    """A line for each layer of each model."""
    return _csv(
        _LAYER_COLUMNS,
        [
            (name, number, *dataclasses.astuple(layer), each.blocks, each.tokens)
            for name, each in found.items()
            for number, layer in enumerate(each.layers, 1)
        ],
    )


def scores_as_csv(measured: Sequence[Measured]) -> str:
    """A line for each score, but for those of subsets. What was refused has none."""
    lines: list[tuple[object, ...]] = []
    for each in measured:
        for result in each.evaluations:
            parts = {"all": result.total}
            if result.interpolated:
                parts["interpolated"] = result.interpolated
            parts |= result.terms | result.pairs
            parts |= {f"from {edge} tokens": score for edge, score in result.positions.items()}
            for part, score in parts.items():
                where = result.length, result.stride or result.length, part
                numbers: tuple[object, ...] = score.perplexity, score.accuracy, score.accuracy_error
                if part == "all" and len(result.terms) > 1:
                    numbers = "", "", ""
                first = each.model, each.trained_length, *where, score.targets, score.loss
                lines.append((*first, *numbers))
    return _csv(_COLUMNS, lines)


def _csv(columns: str, lines: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns.split(","))
    writer.writerows(lines)
    return text.getvalue()
