"""The commands that make and use model folders: export, evaluate, fill-mask and generate."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.config.settings import add_device

if TYPE_CHECKING:
    from data_prep.corpus import Corpus
    from pretrain.inference.evaluate import Evaluation, Refusal
    from pretrain.inference.model_folder import LoadedModel
    from pretrain.objectives.base import PretrainingObjective


def add_export_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `export`."""
    add = command.add_argument
    add("run", type=Path, help="the run's folder")
    add("--output", type=Path, required=True, help="the new model folder")
    step = "step of the checkpoint (default: the newest that no suspected spike precedes)"
    add("--step", type=int, help=step)


def export(options: argparse.Namespace) -> None:
    """Make a model folder from a run's checkpoint.

    example: python -m pretrain export runs/base --output models/base
    """
    from pretrain.inference import model_folder

    step = model_folder.export(options.run, options.output, options.step)
    sys.stdout.write(f"{options.output}: the model of {options.run} after {step} steps\n")
    if options.step is None and (newest := model_folder.newest_checkpoint(options.run)) > step:
        sys.stdout.write(
            f"later checkpoints, up to step {newest}, follow a suspected spike; --step {newest} "
            "exports the newest\n"
        )


def add_evaluate_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `evaluate`."""
    add = command.add_argument
    add("model", type=Path, nargs="+", help="model folders")
    add("--data", type=Path, required=True, help="a corpus folder")
    lengths = "cut the text into windows of so many tokens, such as 512,1024, and score the same "
    lengths += "targets at each (default: blocks as in the validation of a run)"
    add("--lengths", type=_lengths, help=lengths)
    stride = "with --lengths: tokens from one window to the next; each window but a text's first "
    stride += "scores only its last tokens, as many as these (default: windows do not overlap)"
    add("--stride", type=int, help=stride)
    interpolate = "with --lengths: beyond the training length also measure position interpolation, "
    interpolate += "which multiplies positions by training length / length"
    add("--interpolate", action="store_true", help=interpolate)
    blocks = (
        "at most so many blocks, spread over the split; 0: all (default: as in the validation of "
    )
    blocks += "the run); with --lengths, documents (default: all)"
    add("--blocks", type=int, help=blocks)
    packing = "how documents fill blocks (default: as the model was trained); with --lengths, "
    packing += "contiguous reads the split as one text, any other every document by itself"
    add("--packing", choices=("chunked", "best-fit", "complete", "contiguous"), help=packing)
    add("--json", type=Path, help="also write the results to this file")
    add("--csv", type=Path, help="also write a table to this file, with a line for each score")
    plot = "with --lengths: draw perplexity by length, and by position, into this .png file"
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
    """Measure the validation perplexity of model folders.

    Without --lengths the result is that of the run's own validation: to the digit for a run in fp32
    on one rank of the same machine, and up to the order of additions on several ranks.

    example: python -m pretrain evaluate models/base --data corpora/pile --lengths 512,1024
    """
    _check_options(options)
    from data_prep.corpus import Corpus
    from pretrain.data.batches import validation_note
    from pretrain.engine.distributed import choose_device
    from pretrain.inference import evaluation_report as report
    from pretrain.inference.evaluate import validation_objective
    from pretrain.inference.model_folder import load

    device = choose_device(options.device)
    models, corpus = [load(folder) for folder in options.model], Corpus(options.data, "valid")
    objectives = [
        validation_objective(each.model, each.tokenizer.digest(), corpus, each.objective)
        for each in models
    ]
    names = [folder.resolve().name for folder in options.model]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in options.model]
    all_results = [
        (_window_results if options.lengths else _block_results)(options, loaded, objective, corpus)
        for loaded, objective in zip(models, objectives, strict=True)
    ]
    files = options.json, options.csv, options.plot
    # An error now costs no measurement.
    report.write([], *(path if path and not path.is_file() else None for path in files))
    measured: list[report.Measured] = []
    for name, loaded, results in zip(names, models, all_results, strict=True):
        found = report.Measured(name, loaded.sequence_length)
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
    if refused := report.refusals(measured):
        total = sum(len(each.results) for each in measured)
        number = f"{len(refused)} of {total} lengths were not measured"
        raise ValueError(f"{number}: {'; '.join(refused)}")


def _check_options(options: argparse.Namespace) -> None:
    if (options.blocks or 0) < 0:
        raise ValueError(f"--blocks {options.blocks}: accepted: 0 (all) or more")
    only_with_lengths = {
        "--stride": options.stride is not None,
        "--interpolate": options.interpolate,
        "--plot": options.plot,
    }
    for name, given in only_with_lengths.items():
        if given and not options.lengths:
            raise ValueError(f"{name}: accepted only with --lengths")
    if options.plot and options.plot.suffix != ".png":
        raise ValueError(f"--plot {options.plot}: accepted: a file name that ends in .png")


def _block_results(
    options: argparse.Namespace,
    loaded: LoadedModel,
    objective: PretrainingObjective,
    corpus: Corpus,
) -> Iterator[Evaluation]:
    from pretrain.data.sources import SOURCES
    from pretrain.inference.evaluate import evaluate_blocks

    source = SOURCES[options.packing or loaded.packing](corpus, loaded.sequence_length)
    limit = loaded.evaluation_blocks if options.blocks is None else options.blocks
    yield evaluate_blocks(loaded.model, objective, source, limit, loaded.micro_batch_size)


def _window_results(
    options: argparse.Namespace,
    loaded: LoadedModel,
    objective: PretrainingObjective,
    corpus: Corpus,
) -> Iterator[Evaluation | Refusal]:
    from pretrain.inference.evaluate import evaluate_lengths

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


def add_generate_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `generate`."""
    add = command.add_argument
    add("model", type=Path, help="a model folder of a causal model")
    add("prompt", help='such as "The capital of China is"; "" begins a new text')
    most = "most tokens after the prompt; </s> ends a text earlier (default: %(default)s)"
    add("--max-tokens", type=int, default=100, help=most)
    temperature = "0: take the most likely token; others: draw from softmax(logits / temperature) "
    add("--temperature", type=float, default=0.0, help=temperature + "(default: %(default)s)")
    add("--top-k", type=int, help="draw from so many of the most likely tokens (default: all)")
    top_p = "draw from the fewest tokens that have this probability together (default: %(default)s)"
    add("--top-p", type=float, default=1.0, help=top_p)
    add("--seed", type=int, default=1, help="of the draws (default: %(default)s)")
    add_device(command)


def generate(options: argparse.Namespace) -> None:
    """Continue a text with a causal model, and print it as it is made.

    Special tokens other than </s> are never generated.

    example: python -m pretrain generate models/causal "The capital of China is" --max-tokens 20
    """
    from pretrain.engine.distributed import choose_device
    from pretrain.inference.generate import GenerationSettings, stream
    from pretrain.inference.model_folder import load

    settings = GenerationSettings(
        options.max_tokens, options.temperature, options.top_k, options.top_p, options.seed
    )
    device = choose_device(options.device)
    loaded = load(options.model)
    model, prompt = loaded.model.to(device), options.prompt
    for piece in stream(model, loaded.tokenizer, prompt, settings):
        sys.stdout.write(prompt + piece)
        sys.stdout.flush()
        prompt = ""
    sys.stdout.write("\n")
