"""The command `evaluate`: scores, pairs of segments, and what each layer changes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.config.settings import add_device

if TYPE_CHECKING:
    import torch

    from data_prep.corpus import Corpus
    from pretrain.data.sources import Source
    from pretrain.models.evaluate import Evaluation, Refusal
    from pretrain.models.model_folder import LoadedModel
    from pretrain.objectives.base import PretrainingObjective

    _Model = tuple[str, LoadedModel, PretrainingObjective]
    """Its name, the model, and what it is measured by."""

_LAYER_BLOCKS = 32
"""Blocks that --layers reads where nothing else is asked for."""


def add_evaluate_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `evaluate`."""
    add = command.add_argument
    add("model", type=Path, nargs="+", help="model folders")
    add("--data", type=Path, required=True, help="a corpus folder")
    lengths = "cut the text into windows of so many tokens, such as 512,1024, and score the same "
    lengths += "targets at each (default: blocks as in the validation of a run)"
    add("--lengths", type=_lengths, help=lengths)
    layers = "compare the input and the output of every layer: L2 distance, cosine similarity, and "
    layers += "angle, as means over the tokens of some blocks"
    add("--layers", action="store_true", help=layers)
    stride = "with --lengths: tokens from one window to the next; each window but a text's first "
    stride += "scores only its last tokens, as many as these (default: windows do not overlap)"
    add("--stride", type=int, help=stride)
    interpolate = "with --lengths: beyond the training length also measure position interpolation, "
    interpolate += "which multiplies positions by training length / length"
    add("--interpolate", action="store_true", help=interpolate)
    blocks = (
        "at most so many blocks, spread over the split; 0: all (default: as in the validation of "
    )
    blocks += "the run); with --lengths, documents (default: all); with --layers: 32 blocks"
    add("--blocks", type=int, help=blocks)
    packing = "how documents fill blocks (default: as the model was trained); with --lengths, "
    packing += "contiguous reads the split as one text, any other every document by itself"
    packings = ["chunked", "best-fit", "complete", "contiguous", "one-document", "sentence-pairs"]
    add("--packing", choices=packings, help=packing)
    add("--json", type=Path, help="also write the results to this file")
    add("--csv", type=Path, help="also write a table to this file, with a line for each score")
    plot = "with --lengths: draw perplexity by length, and by position, into this .png file; with "
    plot += "--layers: distance and angle by layer"
    add("--plot", type=Path, help=plot)
    add_device(command)


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(word) for word in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: write whole numbers from 2 on, as in 512,1024")
    return list(dict.fromkeys(lengths))


def evaluate(options: argparse.Namespace) -> None:
    """Measure the validation perplexity of model folders, or what their layers do.

    Without --lengths the result is that of the run's own validation: to the digit for a run in fp32
    on one rank of the same machine, and up to the order of additions on several ranks. For models
    with a pair head it has the accuracy on next sentence and on sentence order too.

    example: python -m pretrain evaluate models/base --data corpora/pile --lengths 512,1024
    """
    _check_options(options)
    from data_prep.corpus import Corpus
    from pretrain.engine.distributed import choose_device
    from pretrain.models.evaluate import validation_objective
    from pretrain.models.model_folder import load

    device = choose_device(options.device)
    models, corpus = [load(folder) for folder in options.model], Corpus(options.data, "valid")
    objectives = [
        validation_objective(each.model, each.tokenizer.digest(), corpus, each.objective)
        for each in models
    ]
    names = [folder.resolve().name for folder in options.model]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in options.model]
    measure = _evaluate_layers if options.layers else _evaluate_scores
    measure(options, corpus, list(zip(names, models, objectives, strict=True)), device)


def _evaluate_scores(
    options: argparse.Namespace, corpus: Corpus, models: Sequence[_Model], device: torch.device
) -> None:
    from pretrain.data.batches import validation_note
    from pretrain.models import evaluation_report as report
    from pretrain.models.measured import Measured

    all_results = [
        (_window_results if options.lengths else _block_results)(options, loaded, objective, corpus)
        for _, loaded, objective in models
    ]
    files = options.json, options.csv, options.plot
    # An error now costs no measurement.
    report.write([], *(path if path and not path.is_file() else None for path in files))
    measured: list[Measured] = []
    for (name, loaded, _), results in zip(models, all_results, strict=True):
        recorded = loaded.recipe_section("objective").get("pair_task", "-")
        task = recorded if loaded.model.config.pair_head else None
        found = Measured(name, loaded.sequence_length, pair_task=task)
        measured.append(found)
        if len(models) > 1:
            sys.stdout.write(f"\n{name}, trained on blocks of {found.trained_length:,} tokens\n")
        sys.stdout.write(f"{validation_note(loaded.objective)}\n")
        if options.lengths:
            sys.stdout.write(_what_is_read(options, loaded, corpus))
        loaded.model.to(device)
        counted = "windows" if options.lengths else "blocks"
        sys.stdout.write(report.head(counted, options.interpolate))
        for result in results:
            found.results.append(result)
            sys.stdout.write(report.rows(result, options.interpolate))
            sys.stdout.flush()
            report.write(measured, options.json, options.csv)
        report.write(measured, plot=options.plot)
        sys.stdout.write(report.position_table(found.evaluations))
        loaded.model.to("cpu")
    if table := report.pair_table(measured):
        sys.stdout.write(f"\n{table}")
    if refused := report.refusals(measured):
        total = sum(len(each.results) for each in measured)
        number = f"{len(refused)} of {total} lengths were not measured"
        raise ValueError(f"{number}: {'; '.join(refused)}")


def _evaluate_layers(
    options: argparse.Namespace, corpus: Corpus, models: Sequence[_Model], device: torch.device
) -> None:
    from pretrain.models import evaluation_report as report
    from pretrain.models.layers import LayerChanges, layer_changes

    limit = _LAYER_BLOCKS if options.blocks is None else options.blocks
    for name, loaded, _ in models:
        if loaded.model.config.latents:
            raise ValueError(
                f"--layers: {name} has latents, and its layers work on different vectors; "
                "accepted: models without latents"
            )
    sources = [_source(options, loaded, objective, corpus) for _, loaded, objective in models]
    files = options.json, options.csv, options.plot
    # An error now costs no measurement.
    report.write_layers({}, *(path if path and not path.is_file() else None for path in files))
    found: dict[str, LayerChanges] = {}
    for (name, loaded, objective), source in zip(models, sources, strict=True):
        loaded.model.to(device)
        size = loaded.micro_batch_size
        found[name] = layer_changes(loaded.model, objective, source, limit, size)
        loaded.model.to("cpu")
    sys.stdout.write(report.layer_table(found))
    report.write_layers(found, *files)


def _check_options(options: argparse.Namespace) -> None:
    if (options.blocks or 0) < 0:
        raise ValueError(f"--blocks {options.blocks}: accepted: 0 (all) or more")
    if options.layers and options.lengths:
        raise ValueError("--layers: accepted only without --lengths")
    only_with_lengths = {
        "--stride": options.stride is not None,
        "--interpolate": options.interpolate,
    }
    for name, given in only_with_lengths.items():
        if given and not options.lengths:
            raise ValueError(f"{name}: accepted only with --lengths")
    if options.plot and not (options.lengths or options.layers):
        raise ValueError("--plot: accepted only with --lengths or --layers")
    if options.plot and options.plot.suffix != ".png":
        raise ValueError(f"--plot {options.plot}: accepted: a file name that ends in .png")


def _source(
    options: argparse.Namespace,
    loaded: LoadedModel,
    objective: PretrainingObjective,
    corpus: Corpus,
) -> Source:
    """The blocks that a model is measured on.

    Raises:
        ValueError: the objective cannot read such blocks, or the corpus has none.
    """
    from pretrain.data.batches import refuse_other_packing
    from pretrain.data.sources import SOURCES

    packing = SOURCES[options.packing or loaded.packing]
    refuse_other_packing(packing, objective.settings, loaded.model.config.latents)
    return packing(corpus, loaded.sequence_length)


def _block_results(
    options: argparse.Namespace,
    loaded: LoadedModel,
    objective: PretrainingObjective,
    corpus: Corpus,
) -> Iterator[Evaluation]:
    from pretrain.data.batches import refuse_without_targets
    from pretrain.models.evaluate import evaluate_blocks
    from pretrain.models.pairs import evaluate_pairs, pair_objectives

    source = _source(options, loaded, objective, corpus)
    limit = loaded.evaluation_blocks if options.blocks is None else options.blocks
    pairs = pair_objectives(objective)
    for each in [objective, *pairs.values()]:
        refuse_without_targets(source, each, limit)

    def measure() -> Iterator[Evaluation]:
        evaluate = evaluate_pairs if pairs else evaluate_blocks
        yield evaluate(loaded.model, objective, source, limit, loaded.micro_batch_size)

    return measure()


def _window_results(
    options: argparse.Namespace,
    loaded: LoadedModel,
    objective: PretrainingObjective,
    corpus: Corpus,
) -> Iterator[Evaluation | Refusal]:
    from pretrain.models.evaluate import evaluate_lengths

    return evaluate_lengths(
        loaded.model,
        objective,
        corpus,
        options.lengths,
        options.blocks or 0,
        loaded.micro_batch_size * loaded.sequence_length,
        stride=options.stride,
        one_text=_reads_one_text(options, loaded),
        interpolate_from=loaded.sequence_length if options.interpolate else None,
    )


def _reads_one_text(options: argparse.Namespace, loaded: LoadedModel) -> bool:
    return (options.packing or loaded.packing) == "contiguous"


def _what_is_read(options: argparse.Namespace, loaded: LoadedModel, corpus: Corpus) -> str:
    from pretrain.data.batches import spread

    lengths = corpus.lengths[spread(len(corpus), options.blocks or 0)]
    longest = int(lengths.max()) + 1
    kind = f"the longest of {longest:,} tokens with <s>"
    if _reads_one_text(options, loaded):
        kind = f"read as one text of {int(lengths.sum()):,} tokens"
    elif max(options.lengths) > longest:
        kind += ", so longer windows change nothing"
    documents = f"{len(lengths):,} of {len(corpus):,} documents"
    return f"the same targets at every length, of {documents}, {kind}\n"


COMMANDS = {"evaluate": (add_evaluate_arguments, evaluate)}
