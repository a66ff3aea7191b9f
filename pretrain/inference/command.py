"""The commands that make and use model folders: export, evaluate and fill-mask."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.config.settings import add_device

if TYPE_CHECKING:
    from pretrain.inference.evaluate import Evaluation, Refusal


def add_export_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `export`."""
    add = command.add_argument
    add("run", type=Path, help="the run's folder")
    add("--output", type=Path, required=True, help="the new model folder")
    add("--step", type=int, help="step of the checkpoint (default: the newest)")


def export(options: argparse.Namespace) -> None:
    """Make a model folder from a run's checkpoint.

    example: python -m pretrain export runs/base --output models/base
    """
    from pretrain.inference import model_folder

    step = model_folder.export(options.run, options.output, options.step)
    sys.stdout.write(f"{options.output}: the model of {options.run} after {step} steps\n")


def add_evaluate_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `evaluate`."""
    add = command.add_argument
    add("model", type=Path, help="a model folder")
    add("--data", type=Path, required=True, help="a corpus folder")
    lengths = "cut every document into windows of so many tokens, such as 512,1024, and score the "
    lengths += "same targets at each (default: blocks as in the validation of a run)"
    add("--lengths", type=_lengths, help=lengths)
    blocks = (
        "at most so many blocks, spread over the split; 0: all (default: as in the validation of "
    )
    blocks += "the run); with --lengths, documents (default: all)"
    add("--blocks", type=int, help=blocks)
    packing = "how documents fill blocks (default: as the model was trained)"
    add("--packing", choices=("chunked", "best-fit", "complete", "contiguous"), help=packing)
    add("--json", type=Path, help="also write the results to this file")
    add_device(command)


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(word) for word in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: write whole numbers from 2 on, as in 512,1024")
    return lengths


def evaluate(options: argparse.Namespace) -> None:
    """Measure the validation perplexity of a model folder.

    Without --lengths the result is that of the run's own validation: to the digit for a run in fp32
    on one rank of the same machine, and up to the order of additions on several ranks.

    example: python -m pretrain evaluate models/base --data corpora/pile --lengths 512,1024
    """
    from data_prep.corpus import Corpus
    from pretrain.data.batches import spread, validation_note
    from pretrain.data.sources import SOURCES
    from pretrain.engine.distributed import choose_device
    from pretrain.inference.evaluate import (
        evaluate_blocks,
        evaluate_lengths,
        validation_objective,
    )
    from pretrain.inference.model_folder import load

    if (options.blocks or 0) < 0:
        raise ValueError(f"--blocks {options.blocks}: accepted: 0 (all) or more")
    if options.lengths and options.packing:
        raise ValueError("--packing: with --lengths every document is cut by itself; give only one")
    device = choose_device(options.device)
    loaded = load(options.model)
    model, size = loaded.model.to(device), loaded.micro_batch_size
    corpus = Corpus(options.data, "valid")
    digest = loaded.tokenizer.digest()
    objective = validation_objective(model, digest, corpus, loaded.objective)
    sys.stdout.write(f"{validation_note(loaded.objective)}\n")
    results: Iterable[Evaluation | Refusal]
    if options.lengths:
        tokens = size * loaded.sequence_length
        lengths = options.lengths
        limit = options.blocks or 0
        results = evaluate_lengths(model, objective, corpus, lengths, limit, tokens)
        documents = spread(len(corpus), limit)
        longest = int(corpus.lengths[documents].max()) + 1
        sys.stdout.write(
            f"the same targets at every length, of {len(documents):,} of {len(corpus):,} "
            f"documents, the longest of {longest:,} tokens with <s>\n"
        )
    else:
        source = SOURCES[options.packing or loaded.packing](corpus, loaded.sequence_length)
        limit = loaded.evaluation_blocks if options.blocks is None else options.blocks
        results = (evaluate_blocks(model, objective, each, limit, size) for each in [source])
    _show(results, "windows" if options.lengths else "blocks", options.json)


def _show(results: Iterable[Evaluation | Refusal], counted: str, output: Path | None) -> None:
    """Print a row of a table for each result as soon as it is there, and keep all in a file."""
    import dataclasses

    from pretrain.inference.evaluate import Refusal
    from pretrain.run.checkpoints import write_json

    sys.stdout.write(
        f"{'length':>8} {counted:>10} {'targets':>12} {'coverage':>9} {'loss':>8} "
        f"{'perplexity':>11} {'accuracy':>9}\n"
    )
    done: list[dict[str, object]] = []
    refused = []
    if output and not output.exists():
        write_json(output, done)  # an error now costs no measurement
    for result in results:
        done.append(dataclasses.asdict(result))
        if isinstance(result, Refusal):
            refused.append(f"length {result.length}: {result.refused}")
            sys.stdout.write(f"{result.length:>8} refused: {result.refused}\n")
        else:
            sys.stdout.write(_rows(result))
        sys.stdout.flush()
        if output:
            write_json(output, done)
    if refused:
        number = f"{len(refused)} of {len(done)} lengths were not measured"
        raise ValueError(f"{number}: {'; '.join(refused)}")


def _rows(result: Evaluation) -> str:
    """Lines of the table: the total, and each subset where there are several."""
    head = f"{result.length:>8} {result.blocks:>10,}"
    rows = [(head, f"{result.coverage:.1%}", result.total, "")]
    if len(result.subsets) > 1:
        rows += [(" " * len(head), "", score, f"  {s}") for s, score in result.subsets.items()]
    return "".join(
        f"{head} {score.targets:>12,} {coverage:>9} {score.loss:>8.4f} {score.perplexity:>11.2f} "
        f"{score.accuracy:>9.1%}{name}\n"
        for head, coverage, score, name in rows
    )


def add_fill_mask_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `fill-mask`."""
    add = command.add_argument
    add("model", type=Path, help="a model folder")
    add("text", help='such as "The capital of China is <mask>."')
    add("--top-k", type=int, default=5, help="number of fillers (default: %(default)s)")
    add_device(command)


def fill_mask(options: argparse.Namespace) -> None:
    """Show the most likely fillers of <mask> in a text.

    example: python -m pretrain fill-mask models/base "The capital of China is <mask>."
    """
    from pretrain.engine.distributed import choose_device
    from pretrain.inference.fill_mask import fill_mask as fill
    from pretrain.inference.model_folder import load

    device = choose_device(options.device)
    loaded = load(options.model)
    model = loaded.model.to(device)
    for fillers in fill(model, loaded.tokenizer, options.text, options.top_k):
        for filler in fillers:
            sys.stdout.write(f"{filler.probability:8.4f}  {filler.token!r:<16} {filler.text}\n")
