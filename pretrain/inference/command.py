"""The commands that make and use model folders: export, evaluate and fill-mask."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pretrain.config.settings import add_device


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
    lengths = "tokens of a block, such as 512,1024 (default: what the model was trained on)"
    add("--lengths", type=_lengths, help=lengths)
    add("--blocks", type=int, default=0, help="at most so many blocks (default: all)")
    packing = "how documents fill blocks (default: as the model was trained)"
    add("--packing", choices=("chunked", "best-fit", "complete"), help=packing)
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

    example: python -m pretrain evaluate models/base --data corpora/pile --lengths 512,1024
    """
    import dataclasses

    from pretrain.data.batches import validation_note
    from pretrain.engine.distributed import choose_device
    from pretrain.inference.evaluate import evaluate_lengths
    from pretrain.inference.model_folder import load
    from pretrain.run.checkpoints import write_json

    device = choose_device(options.device)
    loaded = load(options.model)
    lengths = options.lengths or [loaded.model.config.max_positions]
    results = evaluate_lengths(
        loaded.model.to(device),
        loaded.tokenizer.digest(),
        options.data,
        lengths,
        loaded.objective,
        limit=options.blocks,
        packing=options.packing or loaded.packing,
    )
    sys.stdout.write(
        f"{validation_note(loaded.objective)}\n"
        f"{'length':>8} {'subset':<20} {'targets':>12} {'loss':>8} {'perplexity':>11}\n"
    )
    for r in results:
        # A single subset would repeat the total.
        rows = {"all": r.total, **(r.subsets if len(r.subsets) > 1 else {})}
        for name, score in rows.items():
            sys.stdout.write(
                f"{r.length:>8} {name:<20} {score.targets:>12,} {score.loss:>8.4f} "
                f"{score.perplexity:>11.2f}\n"
            )
    if options.json:
        write_json(options.json, [dataclasses.asdict(r) for r in results])


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
