"""The commands that make and use model folders: export, fill-mask and generate."""

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
    step = "step of the checkpoint; 0: the weights that the run began with (default: the newest "
    step += "that no suspected spike precedes)"
    add("--step", type=int, help=step)


def export(options: argparse.Namespace) -> None:
    """Make a model folder from a run's checkpoint.

    example: python -m pretrain export runs/base --output models/base
    """
    from pretrain.models import model_folder
    from pretrain.records.folder import writable_by_others

    sys.stdout.write(writable_by_others(options.run))
    step = model_folder.export(options.run, options.output, options.step)
    sys.stdout.write(f"{options.output}: the model of {options.run} after {step} steps\n")
    if options.step is None and (reason := model_folder.why_not_newest(options.run, step)):
        sys.stdout.write(f"{reason}\n")


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
    from pretrain.models.fill_mask import fill_mask as fill
    from pretrain.models.model_folder import load

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
    from pretrain.models.generate import GenerationSettings, stream
    from pretrain.models.model_folder import load

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


COMMANDS = {
    "export": (add_export_arguments, export),
    "fill-mask": (add_fill_mask_arguments, fill_mask),
    "generate": (add_generate_arguments, generate),
}
