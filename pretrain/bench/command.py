"""The commands about cost: plan and bench."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.config.settings import add_recipe

if TYPE_CHECKING:
    from pretrain.bench.positions import Comparison
    from pretrain.bench.suite import Suite
    from pretrain.config.run import RunConfig


_SHARE_OF_PEAK = 0.5


def add_plan_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan`."""
    add_recipe(command)
    add = command.add_argument
    add("--gpus", type=int, default=8, help="number of GPUs in all (default: %(default)s)")
    kinds = ("a100-40gb", "a100", "h100", "h200")
    add("--kind", default="a100", choices=kinds, help="(default: %(default)s)")
    mfu = f"expected share of the GPUs' peak that is reached (default: {_SHARE_OF_PEAK})"
    add("--mfu", type=float, help=mfu)
    measured = "take that share from this file, which bench --json wrote on such a GPU"
    add("--bench", type=Path, metavar="FILE", help=measured)
    add("--json", type=Path, help="also write the figures to this file")


def plan(options: argparse.Namespace) -> None:
    """Estimate what a run will cost: parameters, memory, time, checkpoints.

    example: python -m pretrain plan pile-base data.corpus=corpora/pile --gpus 8 --kind h100
    """
    import dataclasses

    from pretrain.bench import measured_speed
    from pretrain.bench import plan as planning
    from pretrain.bench.plan_table import table
    from pretrain.config.load import load
    from pretrain.recipe_checks import check_recipe, check_settings
    from pretrain.run.checkpoints import write_json

    config = load(options.recipe, options.overrides)
    if options.gpus < 1:
        raise ValueError(f"--gpus {options.gpus}: accepted: 1 or more")
    corpora = [Path(stream.path) for stream in config.streams]
    has_corpora = corpora and all(corpus.exists() for corpus in corpora)
    (check_recipe if has_corpora else check_settings)(config, options.gpus)
    if options.bench and options.mfu is not None:
        raise ValueError("--mfu and --bench are mutually exclusive")
    share, source = _SHARE_OF_PEAK if options.mfu is None else options.mfu, planning.STATED
    if options.bench:
        share, source = measured_speed.utilization(options.bench, options.kind, config)
    planned = planning.plan(config, options.gpus, options.kind, share, source)
    if config.model.init_from:
        sys.stdout.write(f"{_initial_weights(config)}\n")
    sys.stdout.write(table(planned))
    if options.json:
        write_json(options.json, dataclasses.asdict(planned))


def _initial_weights(config: RunConfig) -> str:
    """Say what the run continues, after checking it where it and the corpus are at hand."""
    from data_prep.manifest import load_manifest
    from pretrain.bench.plan import model_of
    from pretrain.convert import init_from

    source = Path(config.model.init_from)
    corpora = [Path(stream.path) for stream in config.streams]
    if corpora and corpora[0].exists() and source.exists():
        return init_from.check(config, model_of(config), load_manifest(corpora[0]))
    return f"initial weights: those of {source}, not checked: it or its corpus is not here"


def add_bench_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `bench`."""
    add = command.add_argument
    positions = "measure causal models with each position method, beside sinusoidal positions"
    add("--positions", action="store_true", help=positions)
    minutes = "time limit; cases that do not fit are left out and named (default: %(default)s)"
    add("--minutes", type=float, default=8.0, help=minutes)
    add("--size", help="measure this model size only, such as base")
    add("--length", type=int, help="measure rows of this many tokens only")
    add("--json", type=Path, help="also write the figures to this file")
    add("--plot", type=Path, help="plot time per token, or the ratios, to this file (.png)")


def bench(options: argparse.Namespace) -> None:
    """Measure training speed and memory beside other implementations.

    Model sizes, lengths and packing, through DeepSpeed and beside a plain PyTorch loop,
    transformers and the attention of EIFY/fairseq, in the same run. On a CPU the models are small.
    With --positions: training and evaluation of one causal model with each position method.

    example: python -m pretrain bench --minutes 7.5 --json bench.json --plot cost.png
    """
    from pretrain.bench import positions
    from pretrain.bench import suite as benchmark
    from pretrain.bench.worker import log
    from pretrain.run.checkpoints import write_json

    if options.plot and options.plot.suffix != ".png":
        raise ValueError(f"--plot {options.plot}: accepted: a name that ends in .png")
    import torch

    kind = positions if options.positions else benchmark
    todo = kind.cases(torch.cuda.is_available(), options.size, options.length)

    def report(so_far: Suite | Comparison) -> None:
        outcome = so_far.outcomes[-1]
        speed = f"{outcome.tokens_per_second():,.0f} tokens/s"
        log(f"{outcome.case.name()}: {outcome.problem or speed}")
        if options.json:  # after every case: a later one may be killed
            write_json(options.json, so_far.figures())

    measured = kind.run(todo, options.minutes, report)
    sys.stdout.write(kind.table(measured))
    if options.plot:
        kind.plot(measured, options.plot)
