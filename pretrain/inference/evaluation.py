"""The command `evaluate`: measurement, tables, files and plot."""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from data_prep.common import pictures
from data_prep.common.arguments import CommandFailed
from data_prep.common.files import check_writable, write_json
from data_prep.corpus import Corpus
from pretrain.convert.model_folder import LoadedModel, load_model
from pretrain.data.batches import check_packing, evenly_spaced, validation_note
from pretrain.data.sources import SOURCES
from pretrain.engine.distributed import choose_device
from pretrain.inference.evaluate import (
    LengthScores,
    Refusal,
    check_blocks,
    evaluate_blocks,
    evaluate_lengths,
    validation_objective,
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """A result of one of the models."""

    model: str
    """Its name in tables, pictures and files."""
    trained_length: int
    """Tokens of the blocks of its training."""
    result: LengthScores | Refusal


def run(options: argparse.Namespace) -> None:
    """Measure models on the validation split of a corpus; print and write the results.

    Args:
        options: of the command `evaluate`.

    Raises:
        ValueError: an option is not accepted, or a model cannot be measured on the corpus.
        CommandFailed: some lengths could not be measured.
    """
    _check_options(options)
    chosen, corpus = choose_device(options.device), Corpus(options.data, "valid")
    models: list[Path] = options.model
    names = [folder.resolve().name for folder in models]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in models]
    loaded = [load_model(folder) for folder in models]
    all_results = [_results(each, corpus, options) for each in loaded]
    check_writable(options.json)
    measured: list[Measured] = []
    for name, each, results in zip(names, loaded, all_results, strict=True):
        if len(models) > 1:
            length = f"{each.data.sequence_length:,} tokens"
            sys.stdout.write(f"\n{name}, trained on blocks of {length}\n")
        sys.stdout.write(_note(each, corpus, options))
        sys.stdout.write(heading("windows" if options.lengths else "blocks"))
        each.model.to(chosen)
        for result in results:
            measured.append(Measured(name, each.data.sequence_length, result))
            sys.stdout.write(table_rows(result))
            sys.stdout.flush()
            if options.json:
                write_json(options.json, [_as_json(one) for one in measured])
        each.model.to("cpu")
    if options.plot:
        draw_scores(measured, options.plot)
    refused = [
        f"{one.model + ', ' if len(models) > 1 else ''}length {one.result.length}: "
        f"{one.result.refused}"
        for one in measured
        if isinstance(one.result, Refusal)
    ]
    if refused:
        number = f"{len(refused)} of {len(measured)} lengths were not measured"
        raise CommandFailed(f"{number}: {'; '.join(refused)}")


def _check_options(options: argparse.Namespace) -> None:
    if (options.blocks or 0) < 0:
        raise ValueError(f"--blocks {options.blocks}: accepted: 0 (all) or more")
    for option, value in (("--stride", options.stride), ("--plot", options.plot)):
        if value is not None and not options.lengths:
            raise ValueError(f"{option} needs --lengths")
    pictures.check_file(options.plot)


def _results(
    loaded: LoadedModel, corpus: Corpus, options: argparse.Namespace
) -> Iterator[LengthScores | Refusal]:
    """Return the scores by length, or of the blocks; errors are raised at once.

    Raises:
        ValueError: the model or its objective cannot read such text, or the corpus has none.
    """
    model = loaded.language_model
    # Defaults for a model whose training is not known.
    size = int(loaded.recipe_section("batch").get("micro_batch_size", 8))
    objective = validation_objective(model, loaded.tokenizer.digest(), corpus, loaded.objective)
    packing = options.packing or loaded.data.packing
    if options.lengths:
        return evaluate_lengths(
            model,
            objective,
            corpus,
            options.lengths,
            options.blocks or 0,
            size * loaded.data.sequence_length,
            stride=options.stride,
            one_text=packing == "contiguous",
        )
    check_packing(SOURCES[packing], objective.settings, model.config.latents)
    source = SOURCES[packing](corpus, loaded.data.sequence_length)
    usual = int(loaded.recipe_section("training").get("evaluation_blocks", 0))
    limit = usual if options.blocks is None else options.blocks
    check_blocks(objective, source, limit)
    return (evaluate_blocks(model, objective, source, limit, size) for _ in range(1))


def _note(loaded: LoadedModel, corpus: Corpus, options: argparse.Namespace) -> str:
    """Describe what is predicted, and in which blocks or, with --lengths, in which text."""
    note, packing = f"{validation_note(loaded.objective)}\n", options.packing or loaded.data.packing
    if not options.lengths:
        return f"{note}packing of the blocks: {packing}\n"
    read = len(evenly_spaced(len(corpus), options.blocks or 0))
    whole = packing == "contiguous"
    text = f"{read:,} of {len(corpus):,} documents{', read as one text' if whole else ''}"
    return f"{note}every length scores the same targets of {text}\n"


# --- tables --------------------------------------------------------------------------------------


_ROW = "{:>8} {:>10} {:>12} {:>9} {:>8} {:>11} {:>9}{}\n"
"""A line, whose widths are fixed: each is printed as soon as it is measured."""


def heading(counted: str) -> str:
    """The first line of a table of `table_rows`; `counted` is "windows" or "blocks"."""
    names = ("targets", "coverage", "loss", "perplexity", "accuracy")
    return _ROW.format("length", counted, *names, "")


def table_rows(result: LengthScores | Refusal) -> str:
    """Lines of the table: the total, each term and each subset where there are several.

    The total over several terms has a loss, but neither a perplexity nor an accuracy. The last
    lines are those of a pair head on each task.
    """
    if isinstance(result, Refusal):
        return f"{result.length:>8} refused: {result.refused}\n"
    # The only term, of windows of documents, which are not pairs, is the same as the total.
    terms, subsets = (each if len(each) > 1 else {} for each in (result.terms, result.subsets))
    summed, lines = bool(terms), ""
    rows = [("", result.total, summed), *((f"  {n}", s, False) for n, s in terms.items())]
    rows += [(f"  {name}", score, summed) for name, score in subsets.items()]
    rows += [(f"  pairs: {name}", score, False) for name, score in result.pairs.items()]
    length, blocks, coverage = str(result.length), f"{result.blocks:,}", f"{result.coverage:.1%}"
    for last, score, is_sum in rows:
        perplexity = "-" if is_sum else f"{score.perplexity:.2f}"
        accuracy = "-" if is_sum else f"{score.accuracy:.1%}"
        numbers = (f"{score.targets:,}", coverage, f"{score.loss:.4f}", perplexity, accuracy)
        lines += _ROW.format(length, blocks, *numbers, last)
        length = blocks = coverage = ""
    return lines


# --- files ---------------------------------------------------------------------------------------


def _as_json(measured: Measured) -> dict[str, object]:
    of = {"model": measured.model, "trained_length": measured.trained_length}
    return dataclasses.asdict(measured.result) | of


def draw_scores(measured: Sequence[Measured], path: Path) -> None:
    """Draw perplexity by length, the form of Figure 1 of Press et al. 2022."""
    scored = [(each, each.result) for each in measured if isinstance(each.result, LengthScores)]
    strides = {result.stride for _, result in scored if result.stride}
    kind = f"sliding windows, stride {strides.pop():,}" if strides else "non-overlapping windows"
    lengths = sorted({result.length for _, result in scored})
    models = {each.model: each.trained_length for each, _ in scored}
    with pictures.picture(5.5, 4.6 + 0.1 * len(models), path) as figure:
        axes = figure.subplots()
        axes.set(title=f"perplexity by length, {kind}", ylabel="perplexity")
        pictures.axis_of_lengths(axes, lengths)
        for model, trained in models.items():
            results = [result for each, result in scored if each.model == model]
            x, y = zip(*sorted((r.length, r.total.perplexity) for r in results), strict=True)
            (line,) = axes.plot(x, y, marker="o", label=model)
            if x[0] <= trained <= x[-1]:
                value = np.exp(np.interp(trained, x, np.log(y)))
                axes.plot(trained, value, "D", color=line.get_color(), mfc="white", ms=8, zorder=3)
        axes.plot([], [], "D", color="black", mfc="white", label="training length")
        axes.set_yscale("log")  # short after the training length, a curve may explode
        pictures.plain_numbers(axes.yaxis)
        pictures.legend_below(figure)
