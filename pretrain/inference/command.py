"""The commands `evaluate` and `fill-mask`, which use model folders."""

import argparse
import sys
from functools import partial
from pathlib import Path

from data_prep.common import pictures
from data_prep.common.arguments import numbers
from pretrain.config.settings import add_device


def add_evaluate_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `evaluate`."""
    add = command.add_argument
    add("model", type=Path, nargs="+", help="model folders")
    add("--data", type=Path, required=True, help="a corpus folder")
    lengths = "cut the text into windows of these lengths, such as 512,1024, and score the same "
    lengths += "targets at each length (default: blocks as in the validation of a run)"
    add("--lengths", type=partial(numbers, least=2), help=lengths)
    stride = "with --lengths: tokens from one window to the next; each window but a text's first "
    stride += "scores only this many last tokens (default: windows do not overlap)"
    add("--stride", type=int, help=stride)
    blocks = "most blocks to read, spread over the split; 0: all (default: as in the validation of "
    blocks += "the run); with --lengths, documents (default: all)"
    add("--blocks", type=int, help=blocks)
    packing = "how documents fill blocks (default: as the model was trained); with --lengths, "
    packing += "contiguous reads the split as one text, any other every document by itself"
    packings = ["chunked", "best-fit", "complete", "contiguous", "one-document", "sentence-pairs"]
    add("--packing", choices=packings, help=packing)
    add("--json", type=Path, help="also write the results to this file")
    add("--plot", type=Path, help=pictures.HELP.format("perplexity by length"))
    add_device(command)


def evaluate(options: argparse.Namespace) -> None:
    """Measure the validation perplexity of model folders.

    Without --lengths the result equals the run's own validation: exactly for a run in fp32 on one
    rank of the same machine, and up to the order of additions on several ranks. Models with a pair
    head are also scored on next sentence and sentence order.

    example: zeroclap evaluate models/base --data corpora/pile --lengths 512,1024
    """
    from pretrain.inference.evaluation import run

    run(options)


def add_fill_mask_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `fill-mask`."""
    add = command.add_argument
    add("model", type=Path, help="a model folder")
    add("text", help='such as "The capital of China is <mask>."')
    add("--top-k", type=int, default=5, help="number of fillers (default: %(default)s)")
    add_device(command)


def fill_mask(options: argparse.Namespace) -> None:
    """Show the most likely fillers of <mask> in a text.

    example: zeroclap fill-mask models/base "The capital of China is <mask>."
    """
    from pretrain.engine.distributed import choose_device
    from pretrain.inference.pretrained import Pretrained

    model = Pretrained.load(options.model, choose_device(options.device))
    for fillers in model.fill_mask(options.text, options.top_k):
        for filler in fillers:
            # A filler may be a new line, and each has one line here.
            text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in filler.text)
            sys.stdout.write(f"{filler.probability:8.4f}  {filler.token!r:<16} {text}\n")


COMMANDS = {
    "evaluate": (add_evaluate_arguments, evaluate),
    "fill-mask": (add_fill_mask_arguments, fill_mask),
}
